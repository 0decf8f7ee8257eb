"""Receipts: the number of prompt tokens from the prefix cache, and the reason for no more. They hold no words."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from .messages import Role

Tier = Literal["memory", "disk"]


class ChangeCause(StrEnum):
    TOOLS = "tools"  # the client sent other tools, or sent them in another order
    MESSAGE = "message"  # the client changed a message, or left it out
    SETTINGS = "settings"  # reasoning, effort, or another variable of the template
    TEMPLATE = "template"  # the same messages, which the template now renders differently
    TOKENS = "tokens"  # the same text in other tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChange:
    """The reason for a prompt that does not begin with the previous one of its conversation.

    The first difference is at token `num_common_tokens`. A token id is None if its prompt ends there. `message` is
    the index of the changed message, system messages included; None if the change lies before the first message.
    """

    cause: ChangeCause
    num_common_tokens: int
    num_previous_tokens: int
    previous_token_id: int | None
    token_id: int | None
    message: int | None = None
    role: Role | None = None

    def __str__(self) -> str:
        """Return one word for a log line."""
        place = "head" if self.message is None else f"message {self.message} ({self.role})"
        ids = f"{self.previous_token_id} -> {self.token_id}"
        return f"{self.cause} at token {self.num_common_tokens} of {self.num_previous_tokens} ({ids}), {place}"


class Shortfall(StrEnum):
    ALTERED = "altered"  # the prompt does not continue the previous one of its conversation
    NOT_STORED = "not_stored"  # evicted, cleared, or never stored
    NO_RESUME_POINT = "no_resume_point"  # stored, but the model can only resume at an earlier position


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """An expectation from the previous turn: this prompt begins with its first `num_tokens`, except for `change`."""

    num_tokens: int = 0
    change: PromptChange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReceipt:
    """The result of looking a prompt up at the first admission of its sequence, and the expectation."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    stored_tokens: int = 0  # prompt tokens in the prefix cache, resumable or not
    disk_tokens: int = 0  # part of cached_tokens: read from disk for this sequence
    ahead_tokens: int = 0  # part of cached_tokens: computed before the request came
    hit: str = "miss"  # exact, prefix, supersequence, lcp or miss; of several prompts, each kind once
    cache_bytes: int = 0  # held by the prefix cache at the look-up
    max_cache_bytes: int = 0  # 0 if there is no prefix cache
    expectation: Expectation = field(default_factory=Expectation)
    template: tuple[str, ...] = ()  # the rules by which the conversation was rewritten for its template

    @property
    def tier(self) -> Tier | None:
        """Return the slowest tier that cached tokens came from; None if no token was cached."""
        if self.disk_tokens:
            return "disk"
        return "memory" if self.cached_tokens else None

    @property
    def expected_tokens(self) -> int:
        return min(self.expectation.num_tokens, self.prompt_tokens - 1)

    @property
    def shortfall(self) -> Shortfall | None:
        """Return the reason for fewer cached tokens than expected; None for as many."""
        if self.cached_tokens >= self.expected_tokens:
            return None
        if self.stored_tokens < self._num_unaltered:
            return Shortfall.NOT_STORED
        return Shortfall.NO_RESUME_POINT if self.expectation.change is None else Shortfall.ALTERED

    @property
    def why(self) -> str | None:
        """Return the shortfall as a text for people, with its figures."""
        match self.shortfall:
            case Shortfall.ALTERED:
                return f"altered: {self.expectation.change}"
            case Shortfall.NOT_STORED:
                return f"not stored: {self.stored_tokens} of {self._num_unaltered} tokens are in the cache"
            case Shortfall.NO_RESUME_POINT:
                return (
                    f"no resume point: {self.stored_tokens} tokens are stored, the last state at {self.cached_tokens}"
                )
            case None:
                return None

    @property
    def _num_unaltered(self) -> int:
        change = self.expectation.change
        return self.expected_tokens if change is None else min(self.expected_tokens, change.num_common_tokens)


NO_RECEIPT = CacheReceipt()  # for a prompt that was not looked up
