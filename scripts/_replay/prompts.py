"""`python -m scripts._replay.prompts TRACE... FILE`: the lengths that recorded prompts share, without their texts.

Each prompt is rendered and tokenised as the server does it, with a vocabulary trained on the traces. The file has for
each prompt its session, the earlier prompt of the same trace that shares most with it and how many tokens, its length,
its snapshot points, and how many tokens of its reply the next prompt repeats.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.tokenizers import TEMPLATES, save
from vllm_mlx.prompt.encoded import common_prefix
from vllm_mlx.prompt.processor import RequestProcessor

from .checkpoint import texts_of, train
from .ideal import decode, processor_of
from .trace import Recorded, load

_CONTINUED = {"p_continue": "p_session3_otherdir", "long_continue": "long"}  # sessions taken up again, by name
_END = "<|im_end|>"
Ids = tuple[int, ...]


def prompts_of(processor: RequestProcessor, agent: str, trace: Iterable[Recorded]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ids: list[Ids] = []
    for recorded in trace:
        if recorded.protocol is None or recorded.body is None or recorded.body.get("max_tokens") == 1:
            continue
        try:
            prepared = processor.prepare(decode(recorded.protocol, recorded.body))
        except ValueError:  # pydantic's: a body that asks for something else than a reply
            continue
        own = prepared.prompt.token_ids
        common, base = max(((common_prefix(own, other), -number) for number, other in enumerate(ids)), default=(0, 1))
        rows.append(
            {
                "agent": agent,
                "session": _CONTINUED.get(recorded.session, recorded.session),
                "is_continued": recorded.session in _CONTINUED,
                "base": -base,
                "common": common,
                "tokens": len(own),
                "points": list(prepared.prompt.snapshot_points),
                "reply": 0,
            }
        )
        ids.append(own)
        if -base >= 0 and common == len(ids[-base]) and rows[-base]["session"] == rows[-1]["session"]:
            rest = processor.tokenizer.decode(own[common:])
            reply = rest[: rest.find(_END)] if _END in rest else ""
            rows[-base]["reply"] = len(processor.tokenizer.encode(reply, add_special_tokens=False))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("file", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    traces = {path.stem: load(path) for path in arguments.traces}
    texts = list(dict.fromkeys(text for trace in traces.values() for each in trace for text in texts_of(each.body)))
    backend = train(texts)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = save(Path(name), backend, eos=_END, template=(TEMPLATES / "qwen3.jinja").read_text())
        for agent, trace in traces.items():
            first = len(rows)
            rows += prompts_of(processor_of(folder), agent, trace)
            for row in rows[first:]:
                row["base"] += first if row["base"] >= 0 else 0
    lines = ",\n".join(json.dumps(row) for row in rows)
    arguments.file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
