"""How a family's thoughts begin and end, for what bounds a reply: the tags, and what stands around an answer."""

from dataclasses import dataclass

from .family import Place
from .generic import TOOL_FORMATS
from .reasoning_formats import REASONING_FORMATS


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    starts: tuple[str, ...]
    ends: tuple[str, ...]  # the first is what ends a thought that the first start opened, and so on
    atoms: tuple[str, ...] = ()
    is_implied: bool = False
    lead: str = ""  # between a thought and what follows
    answer: str = ""  # before an answer

    def end_for(self, start: int) -> str:
        return self.ends[start] if start < len(self.ends) else self.ends[0]


def reasoning_tags(reasoning: str) -> ReasoningTags:
    """Of the reasoning format of this name."""
    format = REASONING_FORMATS[reasoning]
    starts = format.gate[0] if format.gate is not None else format.opens
    if format.messages is not None:
        tags = format.messages
        return ReasoningTags(starts, (tags.end,), (tags.end,), format.is_implied, tags.lead, tags.answer)
    return ReasoningTags(starts, format.closes, format.atoms, format.is_implied)


def call_tags(tools: str) -> tuple[str, ...]:
    """The tags that open a call even inside of a thought."""
    openings = TOOL_FORMATS[tools].openings
    return tuple(opening.marker for opening in openings if opening.place is Place.ANYWHERE)


def reasoning_markers(reasoning: str) -> tuple[str, str]:
    """The tags that open and close a thought in the format of this name."""
    format = REASONING_FORMATS[reasoning]
    return format.opens[0] if format.opens else format.headers[0].marker, format.closes[0]
