"""Reads the JSON of server-sent events, for tests and tools. Tests of the wire format itself read the lines instead."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

_DATA = "data: "


def event_of(line: str) -> dict[str, Any] | None:
    """The object on one line of a stream; None for a blank line, a comment, an event's name and the final `[DONE]`."""
    if not line.startswith(_DATA + "{"):
        return None
    event: dict[str, Any] = json.loads(line.removeprefix(_DATA))
    return event


def events_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects on the lines of a stream, as they come."""
    return (event for line in lines if (event := event_of(line)) is not None)
