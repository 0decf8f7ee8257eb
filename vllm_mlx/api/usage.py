"""Token counts of a reply: summed over its choices, and why less of the prompt was cached than expected."""

from ..core.events import Usage
from ..core.receipt import CacheReceipt
from .reply import Reply


class UsageTally:
    """Sums the usage of all choices of a reply.

    A prompt that several choices share counts once, with the `cached_tokens` of the choice that computed most of it.
    """

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._usages: dict[int, Usage] = {}

    def add(self, index: int, usage: Usage) -> None:
        self._usages[index] = usage

    def total(self) -> Usage:
        prompts: dict[int, Usage] = {}
        for index, usage in self._usages.items():
            known = prompts.setdefault(index // self._choices_per_prompt, usage)
            if usage.cached_tokens < known.cached_tokens:
                prompts[index // self._choices_per_prompt] = usage
        limits = [usage.clamped_max_tokens for usage in self._usages.values() if usage.clamped_max_tokens is not None]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts.values()),
            cached_tokens=sum(usage.cached_tokens for usage in prompts.values()),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages.values()),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in self._usages.values()),
            clamped_max_tokens=min(limits, default=None),
            receipt=next((usage.receipt for usage in prompts.values() if usage.receipt is not None), None),
        )


class CacheShortfall(Reply):
    """A part of the usage block, the same in all protocols."""

    reason: str
    expected_tokens: int
    stored_tokens: int
    detail: str


def shortfall_of(receipt: CacheReceipt | None) -> CacheShortfall | None:
    """None if as much was cached as expected."""
    if receipt is None or receipt.shortfall is None:
        return None
    return CacheShortfall(
        reason=receipt.shortfall.value,
        expected_tokens=receipt.expected_tokens,
        stored_tokens=receipt.stored_tokens,
        detail=receipt.why or "",
    )
