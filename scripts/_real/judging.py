"""Compares replies with golden ones. It sends nothing and reads no file."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol

_DEVIATIONS = 4.5  # of a share that was drawn: once in 100,000


class Tokenizer(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A reply of the server: the texts of its tokens, without a last one that stopped it."""

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


def texts(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, ...]:
    return tuple(tokenizer.decode([number], skip_special_tokens=False) for number in ids)


def judge(golden: dict[str, Any], found: Found, tokenizer: Tokenizer, near: float, max_off: float) -> Verdict:
    """Equal replies are right. So are those that take, where they part, a second token less than `near` logits behind:
    what follows it cannot be compared. Log probabilities differ by `max_off` at most.
    """
    stop = len(found.tokens) if found.has_stopped else -1
    names = texts(golden["tokens"], tokenizer)
    same = next((n for n, name in enumerate(names) if n == stop or found.tokens[n : n + 1] != (name,)), len(names))
    off = max((abs(a - b) for a, b in zip(golden["logprobs"][:same], found.logprobs, strict=False)), default=0.0)
    if found.num_prompt != len(golden["prompt"]):
        remark = f"the prompt has {found.num_prompt} tokens instead of {len(golden['prompt'])}"
        return Verdict(False, same, off, remark)
    if off > max_off:
        return Verdict(False, same, off, f"a log probability is {off:.4f} off")
    if same == len(names) - found.has_stopped and len(found.tokens) == same:
        return Verdict(True, same, off, "")
    number, gap = golden["second"][same] if same < len(names) else (-1, float("inf"))
    took = "an end" if same == len(found.tokens) else repr(found.tokens[same])
    is_near = gap < near and (same == len(found.tokens) or found.tokens[same] == texts([number], tokenizer)[0])
    expected = repr(names[same]) if same < len(names) else "an end"
    kind = f"near tie ({gap:.3f})" if is_near else f"WRONG (the second best is {gap:.3f} behind)"
    return Verdict(is_near, same, off, f"{kind} at token {same}: {took} instead of {expected}")


def largest_deviation(shares: dict[str, float], counts: dict[str, int]) -> tuple[float, bool]:
    """How far drawn shares are from the golden ones at most, and whether chance explains it."""
    num = sum(counts.values())
    off = {name: abs(counts.get(name, 0) / num - share) for name, share in shares.items()}
    is_chance = all(off[name] <= _DEVIATIONS * sqrt(share * (1 - share) / num) + 1 / num for name, share in shares.items())
    return max(off.values()), is_chance
