"""The JSON Schema Test Suite against the grammars: per keyword what can be written, is kept out, or is refused.

`python -m tests.guidance.scores` writes the table of docs/json-schema.md anew.
"""

import json
import lzma
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.request import Guide, JsonSchema
from vllm_mlx.guidance.grammars import guide_grammar

from .random_sampler import RandomSampler, sampler

SUITE = Path(__file__).parent / "suite" / "draft2020-12.json.xz"
PAGE = Path(__file__).parents[2] / "docs" / "json-schema.md"
BEGIN, END = "<!-- keywords -->", "<!-- end -->"


@dataclass(frozen=True)
class Score:
    """Counts of cases. `wrong`: of invalid values that a grammar lets a model write."""

    written: int
    narrower: int
    kept_out: int
    refused: int
    wrong: tuple[str, ...]

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "wrong"
        if not self.refused:
            return "supported"
        return "in part" if self.kept_out or self.written else "refused"


def scores(step: int = 1) -> dict[str, Score]:
    """Return the score of each keyword, of each `step`-th group of its cases."""
    cases = json.loads(lzma.decompress(SUITE.read_bytes()))
    one = sampler()
    return {keyword: _score(groups[::step], one) for keyword, groups in cases.items()}


def _score(groups: list[dict[str, Any]], one: RandomSampler) -> Score:
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for group in groups:
        try:
            guide = Guide(form=JsonSchema(group["schema"]), param="schema")
            matcher = one.compiler.compile(guide_grammar(guide, one.writer()), "schema")
        except InvalidParameter:
            counts["refused"] += len(group["tests"])
            continue
        for value, is_valid in group["tests"]:
            is_written = _can_write(one, matcher, value)
            counts[f"{is_valid} {is_written}"] += 1
            if is_written and not is_valid:
                wrong.append(f"{group['description']}: {json.dumps(value)}")
    return Score(counts["True True"], counts["True False"], counts["False False"], counts["refused"], tuple(wrong))


def _can_write(one: RandomSampler, matcher: Any, value: Any) -> bool:
    ids = one.tokenizer.encode(json.dumps(value, ensure_ascii=False, separators=(",", ":")), add_special_tokens=False)
    copy = matcher.deep_copy()
    return bool(copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting())


def table(all: dict[str, Score]) -> str:
    lines = ["| keyword | | valid and written | valid and not written | invalid and kept out | refused | wrong |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for keyword, score in all.items():
        counts = (score.written, score.narrower, score.kept_out, score.refused, len(score.wrong))
        lines.append(f"| `{keyword}` | {score.verdict} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def page(all: dict[str, Score]) -> str:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(all)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(scores()), encoding="utf-8")
