"""What stands between the tags of a tool call: name and arguments, read while they arrive."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from .tool_schema import Schemas


class BodyStatus(Enum):
    OPEN = auto()
    DONE = auto()  # the call is complete; what follows is not part of it
    STUCK = auto()  # the next character cannot stand here, unless it begins a tag around the body
    FAILED = auto()  # this is no call
    ENDED = auto()  # no call, only what closes a list of calls
    REASONING = auto()  # no call, only the header of a thought, which follows
    TEXT = auto()  # no call, only the header of content, which follows


@dataclass(frozen=True, slots=True)
class BodyContext:
    """`encode` gives a tag as the body will meet it; `enclosing` are the tags around the body, so encoded."""

    schemas: Schemas = field(default_factory=dict)
    enclosing: tuple[str, ...] = ()
    may_call: bool = True
    encode: Callable[[str], str] = str


class Body:
    """What all bodies have in common."""

    name: str | None = None
    call_id: str | None = None  # written by the model

    @property
    def reads_tags(self) -> bool:
        """Whether the body still waits for tags of its own, which tags around it may look like."""
        return False

    @property
    def status(self) -> BodyStatus:
        raise NotImplementedError

    def consume(self, text: str, *, final: bool = False) -> int:
        """Read on and return how many characters were taken; the rest is to be shown again, with more behind it.

        `final`: no more text of this body comes, so nothing is held back.
        """
        raise NotImplementedError

    def take_arguments(self) -> str:
        """The JSON text of the arguments that was read since the last call."""
        return ""

    def close(self) -> bool:
        """The closing tag has come. Returns whether the call is complete."""
        return False

    def cut(self, rest: str) -> None:
        """A limit ends the reply inside the body, `rest` being held back: add what there is of the arguments."""

    def end(self) -> None:
        """The model ends its turn inside the body: close the arguments, so that they are one JSON object.

        What is held back goes, as the tag that it may have become, and so does an item whose value did not begin.
        """

    def follow(self) -> "Body | None":
        """Behind a complete call: what reads a further one that has no opening tag of its own."""
        return None


NewBody = Callable[[BodyContext], Body]


class Wrapper(Body):
    """A body that hands over to another one once it has chosen it."""

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
        """Read up to where the inner body begins and set it, or the status. Returns how many characters were taken."""
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
