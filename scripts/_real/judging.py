"""Compares replies with golden ones. It sends nothing and reads no file."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol

_END = "(end)"
_DEVIATIONS = 4.5  # of a share that was drawn: once in 100,000


class Tokenizer(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A reply of the server: the texts of its tokens, without the token that stopped it."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    num_prompt: int
    has_stopped: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    is_right: bool
    num_equal: int  # tokens before the first other one
    off: float  # the largest difference of a log probability among them
    remark: str  # empty for an equal reply


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges replies by the checkpoint's tokens, its stop tokens, and the differences that rounding may cause.

    Equal replies are right. So are those that take, where they part, a second best token less than `near` logits
    behind: what follows it cannot be compared. A log probability may be `off` so far.
    """

    tokenizer: Tokenizer
    stops: frozenset[int]
    near: float
    off: float

    def name(self, number: int) -> str:
        return _END if number in self.stops else self.tokenizer.decode([number], skip_special_tokens=False)

    def verdict(self, golden: Mapping[str, Any], found: Found) -> Verdict:
        names = tuple(map(self.name, golden["tokens"]))
        got = (*found.tokens, _END) if found.has_stopped else found.tokens
        same = next((n for n, pair in enumerate(zip(names, got, strict=False)) if pair[0] != pair[1]),
                    min(len(names), len(got)))  # fmt: skip
        off = max((abs(a - b) for a, b in zip(golden["logprobs"][:same], found.logprobs, strict=False)), default=0.0)
        if found.num_prompt != len(golden["prompt"]):
            remark = f"the prompt has {found.num_prompt} tokens instead of {len(golden['prompt'])}"
            return Verdict(False, same, off, remark)
        if off > self.off:
            return Verdict(False, same, off, f"a log probability is {off:.4f} off")
        if got == names:
            return Verdict(True, same, off, "")
        if same == min(len(names), len(got)):
            return Verdict(False, same, off, f"{len(got)} tokens instead of {len(names)}")
        number, gap = golden["second"][same]
        is_near = gap < self.near and got[same] == self.name(number)
        kind = f"near tie ({gap:.3f})" if is_near else f"WRONG (the second best is {gap:.3f} behind)"
        return Verdict(is_near, same, off, f"{kind} at token {same}: {got[same]!r} instead of {names[same]!r}")


def largest_deviation(shares: Mapping[str, float], counts: Mapping[str, int]) -> tuple[float, bool]:
    """Return the largest distance between drawn and golden shares, and whether chance explains it."""
    num = sum(counts.values())
    off = {name: abs(counts.get(name, 0) / num - share) for name, share in shares.items()}
    allowed = {name: _DEVIATIONS * sqrt(share * (1 - share) / num) + 1 / num for name, share in shares.items()}
    return max(off.values()), all(off[name] <= allowed[name] for name in shares)
