"""Adds up the usage of all choices of one reply."""

from ..core.events import Usage


class UsageTally:
    """Choices that share a prompt count it once, as cached as it was for the choice that computed most of it."""

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
