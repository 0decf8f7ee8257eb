"""What stands between the tags of a tool call: name and arguments, read while they arrive."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Protocol

Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> JSON schema of its parameters


class BodyStatus(Enum):
    OPEN = auto()
    DONE = auto()  # the call is complete; what follows is not part of it
    STUCK = auto()  # the next character cannot stand here, unless it begins a tag around the body
    FAILED = auto()  # this is no call


class ToolBody(Protocol):
    @property
    def status(self) -> BodyStatus: ...

    @property
    def name(self) -> str | None: ...

    def consume(self, text: str, *, final: bool = False) -> int:
        """Read on and return how many characters were taken; the rest is to be shown again, with more behind it.

        `final`: no more text of this body comes, so nothing is held back.
        """
        ...

    def take_arguments(self) -> str:
        """The JSON text of the arguments that was read since the last call."""
        ...

    def close(self) -> bool:
        """The closing tag has come. Returns whether the call is complete."""
        ...

    def cut(self, rest: str) -> None:
        """The reply ends inside the body, `rest` being held back: add to the arguments what there is of them."""
        ...
