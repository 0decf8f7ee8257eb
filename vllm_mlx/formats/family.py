"""What a reasoning format and a tool format are made of. The tables of them are elsewhere."""

from dataclasses import dataclass
from enum import Enum, auto

from .bodies import NewBody


class Place(Enum):
    """Where a tag counts."""

    ANYWHERE = auto()
    OUTSIDE_REASONING = auto()
    AT_START = auto()  # of the content, of what follows a thought or a call


@dataclass(frozen=True, slots=True)
class Opening:
    """A tag that begins something with a body: a call, mostly."""

    marker: str
    new_body: NewBody
    place: Place = Place.ANYWHERE
    keeps_marker: bool = False  # the body reads it again
    needs_tools: bool = False  # counts only where tools are declared: too common a text


@dataclass(frozen=True, slots=True)
class MessageTags:
    """Where a thought and an answer are messages of their own."""

    end: str  # of a thought
    lead: str  # begins a further message
    answer: str  # heads an answer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    opens: tuple[str, ...]
    closes: tuple[str, ...]  # dropped wherever they stand
    is_implied: bool = False  # the reply is a thought until a closing tag, whether or not one was opened
    is_shown: bool = False  # thoughts are content, their tags included
    wrap: tuple[str, str] | None = None  # tags around the answer
    headers: tuple[Opening, ...] = ()  # of messages, where a header says what its message is
    header_tags: tuple[str, ...] = ()  # that stand inside of `headers`
    gate: tuple[tuple[str, ...], tuple[str, ...]] | None = None  # what opens and ends thoughts, where headers do
    messages: MessageTags | None = None
    atoms: tuple[str, ...] = ()  # tokens that the tags are spelled with, where they are no tokens themselves

    @property
    def tags(self) -> tuple[str, ...]:
        headers = tuple(header.marker for header in self.headers)
        return (*self.opens, *self.closes, *(self.wrap or ()), *headers, *self.header_tags)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    openings: tuple[Opening, ...]
    closes: tuple[str, ...] = ()  # of a call, or of what holds calls; dropped behind a call
    drops: tuple[str, ...] = ()  # that end a message, and are no part of any text
    inner_tags: tuple[str, ...] = ()  # that stand inside of bodies
    id_length: int | None = None  # of the call ids that the family's template takes; None: any
    reasoning: ReasoningFormat | None = None  # that reads the headers of messages, where none was chosen
    is_fallback: bool = False  # finds calls of many families, of declared tools only

    @property
    def opens(self) -> tuple[str, ...]:
        return tuple(opening.marker for opening in self.openings)

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.opens, *self.closes, *self.drops, *self.inner_tags)
