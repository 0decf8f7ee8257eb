"""The body of a tool call: name and arguments, read while they arrive."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from .tool_schema import Schemas


class BodyStatus(Enum):
    OPEN = auto()
    DONE = auto()  # the call is complete; text that follows is not part of it
    STUCK = auto()  # the next character is wrong here, unless it begins a tag around the body
    FAILED = auto()  # this is no call
    ENDED = auto()  # no call, only the end of a list of calls
    REASONING = auto()  # no call, only the header of reasoning that follows
    TEXT = auto()  # no call, only the header of content that follows


@dataclass(frozen=True, slots=True)
class BodyContext:
    """`encode` returns a tag as the body will meet it; `enclosing` are the encoded tags around the body."""

    schemas: Schemas = field(default_factory=dict)
    enclosing: tuple[str, ...] = ()
    may_call: bool = True
    encode: Callable[[str], str] = str


class Body:
    """Reads the text of one call. Every body has these methods."""

    name: str | None = None
    call_id: str | None = None  # written by the model

    @property
    def reads_tags(self) -> bool:
        """Whether the body waits for a tag of its own, which a tag around the body may resemble."""
        return False

    @property
    def status(self) -> BodyStatus:
        raise NotImplementedError

    def consume(self, text: str, *, final: bool = False) -> int:
        """Read text and return how many characters were taken; the caller passes the rest again, with more text.

        `final`: no more text of this body follows, so nothing is held back.
        """
        raise NotImplementedError

    def take_arguments(self) -> str:
        """Return the JSON text of the arguments that was read since the last call of this method."""
        return ""

    def close(self) -> bool:
        """End the body at its closing tag. Returns whether the call is complete."""
        return False

    def cut(self, rest: str) -> None:
        """A limit cut the reply inside the body: add the part of the arguments that was read. `rest` was held back."""

    def end(self) -> None:
        """The model ended its turn inside the body: close the arguments, so that they are one JSON object.

        Text that was held back because it may be a tag is dropped, and so is an item with no value yet.
        """

    def follow(self) -> "Body | None":
        """Return the body that reads a further call without an opening tag of its own, behind a complete call."""
        return None


NewBody = Callable[[BodyContext], Body]


class Wrapper(Body):
    """A body that chooses another body and then leaves the reading to it."""

    def __init__(self) -> None:
        self._inner: Body | None = None
        self._status = BodyStatus.OPEN

    @property
    def status(self) -> BodyStatus:
        return self._inner.status if self._inner is not None else self._status

    @property
    def reads_tags(self) -> bool:
        return self._inner is None or self._inner.reads_tags

    @property
    def name(self) -> str | None:  # type: ignore[override]
        return self._inner.name if self._inner is not None else None

    @property
    def call_id(self) -> str | None:  # type: ignore[override]
        return self._inner.call_id if self._inner is not None else None

    def consume(self, text: str, *, final: bool = False) -> int:
        position = 0
        if self._inner is None:
            self._status = BodyStatus.OPEN
            position = self._choose(text, final)
        if self._inner is None:
            return position
        return position + self._inner.consume(text[position:], final=final)

    def _choose(self, text: str, final: bool) -> int:
        """Read up to where the inner body begins, and set it or the status. Returns how many characters were taken."""
        raise NotImplementedError

    def take_arguments(self) -> str:
        return self._inner.take_arguments() if self._inner is not None else ""

    def close(self) -> bool:
        return self._inner is not None and self._inner.close()

    def cut(self, rest: str) -> None:
        if self._inner is not None:
            self._inner.cut(rest)

    def end(self) -> None:
        if self._inner is not None:
            self._inner.end()

    def follow(self) -> Body | None:
        return self._inner.follow() if self._inner is not None else None
