"""What constrains the tokens of one reply: a grammar, and the budget of its reasoning. Holds no state of a reply."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol


class Tag(Enum):
    """The tag that a reply's last token completed."""

    START = auto()  # the tag that opens reasoning
    END = auto()  # the tag that ends reasoning
    CALL = auto()  # opens a tool call, which also ends reasoning


class TagWatch(Protocol):
    """Follows one reply's tokens; a token costs the same at any length of the reply.

    `leftover`: the text behind the last tag that its last token contained, as ids of its own.
    """

    leftover: tuple[int, ...]

    def feed(self, token_id: int) -> Tag | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningRule:
    """How reasoning begins and ends, in token ids."""

    new_watch: Callable[[], TagWatch]
    starts: tuple[tuple[int, ...], ...]
    end: tuple[int, ...]  # forced when the budget is spent
    is_open: bool  # the prompt has opened the reasoning
    may_open: bool  # the reply may begin with reasoning
    budget: int | None = None  # tokens of reasoning, before each answer; None: no limit
    prompt_reasoning: tuple[int, ...] = ()  # reasoning tokens already in the prompt; they count against the budget
    layout: tuple[int, ...] = ()  # line breaks: one may separate the reasoning from the text that a grammar constrains


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """`matcher` is an llguidance.LLMatcher at its start, opaque here; every reply uses a copy. None: no grammar."""

    matcher: Any = None
    param: str = ""  # the request field that asks for the grammar
    mask_words: int = 0  # 32-bit words of a mask over the vocabulary
    reasoning: ReasoningRule | None = None  # None: the grammar constrains the reply from its first token on
    barred: tuple[int, ...] = ()  # not allowed in reasoning: the grammar could not continue behind these tokens
