"""Adds up the usage of all choices of one reply."""

from vllm_mlx.core.events import Usage

from .replies import CompletionTokensDetails, PromptTokensDetails, UsageReply


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
        )

    def reply(self) -> UsageReply:
        total = self.total()
        reply = UsageReply(
            prompt_tokens=total.prompt_tokens,
            completion_tokens=total.completion_tokens,
            total_tokens=total.prompt_tokens + total.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=total.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=total.reasoning_tokens),
        )
        if total.clamped_max_tokens is not None:
            reply.max_completion_tokens = total.clamped_max_tokens
        return reply
