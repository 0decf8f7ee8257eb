"""`python -m scripts._replay.beginnings [--lengths] TRACE... FILE`: what recorded sessions share, without their texts.

Without the flag, FILE gets the first requests. A line that all sessions of an agent share is kept as its length, and
stands again as made-up words of that length. Lines in which sessions differ are kept, so that prompts part where the
recorded ones do.

With `--lengths`, each prompt is rendered and tokenised as the server does it, with a vocabulary trained on the traces.
FILE has for each prompt its session, the earlier prompt of the same trace that shares most with it and how many tokens,
its length, its snapshot points, and how many tokens of its reply the next prompt repeats.
"""

import argparse
import json
import random
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

# The most tokens that requests across sessions may compute, in a model that resumes at snapshot points, for each token
# that no earlier prompt began with. Sessions of codex differ in the last few lines only.
MOST_COMPUTED = {"claude_code": 1.02, "codex": 1.10, "opencode": 1.03}
_CONTINUED = {"p_continue": "p_session3_otherdir", "long_continue": "long"}  # sessions taken up again, by name
_END = "<|im_end|>"
Ids = tuple[int, ...]
_KEPT = ("system", "instructions", "messages", "input")
_WORDS = [
    "read", "write", "look", "find", "code", "file", "test", "line", "text", "make", "list", "name",
    "tool", "call",
]  # fmt: skip


def first_requests(trace: Iterable[Recorded]) -> list[Recorded]:
    """Return the first request with tools of each session that does not go on from another one."""
    found: dict[str, Recorded] = {}
    for recorded in trace:
        if recorded.protocol is not None and recorded.body is not None and recorded.body.get("tools"):
            found.setdefault(recorded.session, recorded)
    return [
        each
        for each in found.values()
        if all(item.get("role") != "assistant" for item in (each.body or {})[_items(each)])
    ]


def _items(recorded: Recorded) -> str:
    assert recorded.protocol is not None
    return recorded.protocol.items


def shortened(trace: Iterable[Recorded]) -> dict[str, Any]:
    """Return the lengths of an agent's shared lines, and its first requests as numbers of lines and lines."""
    requests = first_requests(trace)
    bodies = [recorded.body or {} for recorded in requests]
    texts = [{name: body[name] for name in _KEPT if name in body} for body in bodies]
    shared = set.intersection(*(set(_lines(text)) for text in texts))
    numbers = {line: number for number, line in enumerate(dict.fromkeys(filter(shared.__contains__, _lines(texts[0]))))}
    sessions = [
        {
            "session": recorded.session,
            "endpoint": recorded.endpoint,
            "tools": [len(json.dumps(tool)) for tool in body["tools"]],
            "body": _replaced(text, numbers),
        }
        for recorded, body, text in zip(requests, bodies, texts, strict=True)
    ]
    return {"lines": [len(line) for line in numbers], "sessions": sessions}


def _lines(value: Any) -> Iterable[str]:
    match value:
        case {"text": str(text)} | {"content": str(text)}:
            yield from text.split("\n")
        case dict():
            for item in value.values():
                yield from _lines(item)
        case list():
            for item in value:
                yield from _lines(item)


def _replaced(value: Any, numbers: dict[str, int]) -> Any:
    """Return the value without ids, and with numbered lines in the place of texts."""
    match value:
        case dict():
            return {
                name: {"lines": _numbered(item, numbers)}
                if name in ("text", "content") and isinstance(item, str)
                else _replaced(item, numbers)
                for name, item in value.items()
                if name not in ("id", "cache_control")
            }
        case list():
            return [_replaced(item, numbers) for item in value]
    return value


def _numbered(text: str, numbers: dict[str, int]) -> list[list[int] | str]:
    """Return the lines of a text: its own, and the first and last numbers of runs of shared ones."""
    result: list[list[int] | str] = []
    for line in text.split("\n"):
        number, last = numbers.get(line), result[-1] if result else None
        if number is None:
            result.append(line)
        elif isinstance(last, list) and last[1] == number - 1:
            last[1] = number
        else:
            result.append([number, number])
    return result


def requests_of(kept: dict[str, Any]) -> list[Recorded]:
    """Make requests again of what `shortened` kept."""
    lines = [_words(size, number) for number, size in enumerate(kept["lines"])]
    return [
        Recorded(
            number=number,
            session=each["session"],
            at_s=0.0,
            method="POST",
            endpoint=each["endpoint"],
            headers={},
            body={
                "model": "m",
                "stream": True,
                **_settings(each["endpoint"]),
                **_restored(each["body"], lines),
                "tools": [_tool(each["endpoint"], place, size) for place, size in enumerate(each["tools"])],
            },
        )
        for number, each in enumerate(kept["sessions"], 1)
    ]


def _settings(endpoint: str) -> dict[str, Any]:
    if "responses" in endpoint:
        return {"max_output_tokens": 1}
    return {"max_tokens": 1, **({} if "messages" in endpoint else {"stream_options": {"include_usage": True}})}


def _words(size: int, number: int) -> str:
    draw = random.Random(number)
    return " ".join(draw.choice(_WORDS) for _ in range(size // 5 + 1))[:size]


def _restored(value: Any, lines: list[str]) -> Any:
    match value:
        case {"lines": list(kept)}:
            return "\n".join(
                item if isinstance(item, str) else "\n".join(lines[item[0] : item[1] + 1]) for item in kept
            )
        case dict():
            return {name: _restored(item, lines) for name, item in value.items()}
        case list():
            return [_restored(item, lines) for item in value]
    return value


def _tool(endpoint: str, place: int, size: int) -> dict[str, Any]:
    described = {"name": f"tool_{place}", "description": _words(size, -1 - place)}
    schema = {"type": "object", "properties": {}}
    if endpoint.startswith("/v1/messages"):
        return {**described, "input_schema": schema}
    function = {**described, "parameters": schema}
    return {"type": "function", **function} if "responses" in endpoint else {"type": "function", "function": function}


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


def lengths_of(traces: dict[str, list[Recorded]]) -> list[dict[str, Any]]:
    texts = list(dict.fromkeys(text for trace in traces.values() for each in trace for text in texts_of(each.body)))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = save(Path(name), train(texts), eos=_END, template=(TEMPLATES / "qwen3.jinja").read_text())
        for agent, trace in traces.items():
            first = len(rows)
            rows += prompts_of(processor_of(folder), agent, trace)
            for row in rows[first:]:
                row["base"] += first if row["base"] >= 0 else 0
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--lengths", action="store_true", help="write the lengths that prompts share")
    arguments = parser.parse_args()
    traces = {path.stem: load(path) for path in arguments.traces}
    if arguments.lengths:
        text = "[\n" + ",\n".join(map(json.dumps, lengths_of(traces))) + "\n]\n"
    else:
        kept = ((agent, shortened(trace)) for agent, trace in traces.items())
        text = "{\n" + ",\n".join(f"{json.dumps(agent)}: {json.dumps(each)}" for agent, each in kept) + "\n}\n"
    arguments.file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
