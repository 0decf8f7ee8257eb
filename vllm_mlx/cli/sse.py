"""Reads the JSON of server-sent events, for the commands and the tools.

Tests of the wire format itself read the lines instead.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

_DATA = "data:"


def event_of(line: str) -> dict[str, Any] | None:
    """The object on one line of a stream; None for a blank line, a comment, an event's name and the final `[DONE]`.

    Raises ValueError for data that is no JSON object.
    """
    data = line.removeprefix(_DATA).strip()
    if not line.startswith(_DATA) or data == "[DONE]":
        return None
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError(f"an event is no JSON object: {data[:80]}")
    return event


def events_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects on the lines of a stream, as they arrive. Raises ValueError for data that is no JSON object."""
    return (event for line in lines if (event := event_of(line)) is not None)
