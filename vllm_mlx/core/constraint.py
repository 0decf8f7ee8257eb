"""What bounds the tokens of one reply: a grammar, and how long it may think before. Holds no state of any reply."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol


class Tag(Enum):
    """What a reply's last token completed."""

    START = auto()  # of a thought
    END = auto()  # of a thought
    CALL = auto()  # the tag that opens a tool call, which ends a thought too


class TagWatch(Protocol):
    """Follows one reply's tokens; a step costs the same at any length.

    `leftover`: text that the last tag's last token holds behind the tag, as ids of its own.
    """

    leftover: tuple[int, ...]

    def feed(self, token_id: int) -> Tag | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningRule:
    """How thoughts begin and end, in token ids."""

    new_watch: Callable[[], TagWatch]
    starts: tuple[tuple[int, ...], ...]
    end: tuple[int, ...]  # what is forced when the budget is spent
    is_open: bool  # the prompt has opened a thought
    may_open: bool  # the reply may begin with one
    budget: int | None = None  # tokens of each thought; None: no bound
    prompt_reasoning: tuple[int, ...] = ()  # of the open thought, what stands in the prompt: the budget pays for it
    layout: tuple[int, ...] = ()  # line breaks, one of which may stand between a thought and what a grammar bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """`matcher` is an llguidance.LLMatcher at its start, opaque here; every reply takes a copy. None: no grammar."""

    matcher: Any = None
    param: str = ""  # the request field that asks for the grammar
    mask_words: int = 0  # 32-bit words of a mask over the vocabulary
    reasoning: ReasoningRule | None = None  # None: the grammar bounds the reply from its first token on
    barred: tuple[int, ...] = ()  # inside of thoughts: the grammar could not go on behind these
