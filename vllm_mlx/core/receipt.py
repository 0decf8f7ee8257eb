"""What of a prompt was taken from the prefix cache, and why not more. Holds no words of it."""

from dataclasses import dataclass, field
from enum import StrEnum

from .prompt_change import PromptChange


class Shortfall(StrEnum):
    ALTERED = "altered"  # the prompt does not go on from the last one of its conversation
    NOT_STORED = "not_stored"  # given up for want of room, cleared, or never kept
    NO_RESUME_POINT = "no_resume_point"  # stored, but the model can only resume further back


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What an earlier turn lets expect: its first `num_tokens` are this prompt's, but for `change`. 0: nothing."""

    num_tokens: int = 0
    change: PromptChange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReceipt:
    prompt_tokens: int
    cached_tokens: int  # not computed again
    stored_tokens: int  # of the prompt, in the cache, whether or not it could be resumed there
    expectation: Expectation = field(default_factory=Expectation)

    @property
    def expected_tokens(self) -> int:
        return min(self.expectation.num_tokens, self.prompt_tokens - 1)

    @property
    def shortfall(self) -> Shortfall | None:
        """Why fewer tokens were cached than expected; None: they were not fewer."""
        if self.cached_tokens >= self.expected_tokens:
            return None
        if self.stored_tokens < self._num_unaltered:
            return Shortfall.NOT_STORED
        return Shortfall.NO_RESUME_POINT if self.expectation.change is None else Shortfall.ALTERED

    @property
    def why(self) -> str | None:
        """The same for people, with the figures."""
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
