"""Reads the body of a tool call, name and arguments, while it arrives."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from .tool_schema import Schemas

FUNCTION_PREFIX = "functions."  # models write it before a tool's name
_WHITE = re.compile(r"\s*")


class BodyStatus(Enum):
    OPEN = auto()
    WAITING = auto()  # more text is needed to classify the next character
    DONE = auto()  # the call is complete; text that follows is not part of it
    STUCK = auto()  # the next character is wrong here, unless it begins a tag around the body
    FAILED = auto()  # this is not a call
    ENDED = auto()  # not a call but the end of a list of calls
    REASONING = auto()  # not a call but the header of reasoning that follows
    TEXT = auto()  # not a call but the header of content that follows
    NOTHING = auto()  # not a call but the header of a message without a reader


@dataclass(frozen=True, slots=True)
class BodyContext:
    """`encode` returns a tag as the body will meet it; `enclosing` are the encoded tags around the body."""

    schemas: Schemas = field(default_factory=dict)
    enclosing: tuple[str, ...] = ()
    may_call: bool = True
    encode: Callable[[str], str] = str

    def tool_name(self, written: str) -> str:
        """Return the name of a tool without the prefix, which is part of it only if a tool is declared so."""
        return written if written in self.schemas else written.removeprefix(FUNCTION_PREFIX) or written


class Body:
    """Reads the text of one call. Every body has these methods and attributes."""

    name: str | None = None
    call_id: str | None = None  # written by the model
    has_begun = False  # the arguments have begun, or the call has ended without any
    is_whole = False  # the arguments are one complete object, and nothing after it changes that
    ends_with_reply = False  # the end of the reply also ends this body's call
    chosen: "Body | None" = None  # the body that reads everything from here on instead of this one
    follow: "Callable[[], Body] | None" = None
    """Makes the body of the next call, if it may follow a complete call without its own opening tag."""

    def __init__(self, context: BodyContext = BodyContext()) -> None:
        self._context = context
        self.status = BodyStatus.OPEN
        self._arguments = ""

    @property
    def reads_tags(self) -> bool:
        """Return whether the body waits for one of its own tags, which a tag around the body may resemble."""
        return False

    def consume(self, text: str, *, final: bool = False) -> int:
        """Read text and return how many characters were taken; the caller passes the rest again, with more text.

        `final`: no more text of this body follows, so nothing is held back.
        """
        self.status = is_open = BodyStatus.OPEN
        position = 0
        while position < len(text) and self.status is is_open:
            position = self._read(text, position, final)
        return position

    def _read(self, text: str, position: int, final: bool) -> int:
        """Read some text from `position` and return where reading continues. Sets the status where it does not."""
        raise NotImplementedError

    def take_arguments(self) -> str:
        """Return the JSON text of the arguments that was read since the last call of this method."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def close(self) -> bool:
        """End the body at its closing tag. Returns whether the call is complete."""
        return False

    def cut(self, rest: str) -> None:
        """End the body where a limit cut the reply: add the part of the arguments that was read.

        `rest`: the text that was held back.
        """

    def end(self) -> bool:
        """End the body where the call cannot continue: close the arguments, so that they are one JSON object.

        Text that was held back because it may be a tag is dropped, and so is an item that has no value yet. Returns
        whether nothing was open, so that the model wrote the arguments whole.
        """
        return True


NewBody = Callable[[BodyContext], Body]


class Chooser(Body):
    """A body that reads up to the beginning of another one, sets `chosen` to that, and reads nothing after it."""

    @property
    def reads_tags(self) -> bool:
        return True

    def consume(self, text: str, *, final: bool = False) -> int:
        self.status = BodyStatus.OPEN
        end = self._choose(text, final)
        if self.chosen is not None and self.follow is not None:
            self.chosen.follow = self.follow
        return end

    def _choose(self, text: str, final: bool) -> int:
        """Read up to the beginning of the inner body, and set that or the status. Returns the number of characters."""
        raise NotImplementedError


def begins_object(text: str, position: int) -> bool | None:
    """Return whether an object with quoted keys, or an empty one, begins here; None if more text is needed."""
    behind = skip_white(text, position + 1)
    if not text.startswith("{", position) or behind == len(text):
        return None if text.startswith("{", position) else False
    return text[behind] in '"}'


def skip_white(text: str, position: int) -> int:
    """Return the end of the white space at `position`."""
    white = _WHITE.match(text, position)
    return white.end() if white else position
