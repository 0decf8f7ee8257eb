"""Replies without what is different each time: ids, times, random names. Knows no protocol's meaning."""

import json
import re
from typing import Any

_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rb"\b(chatcmpl-|cmpl-|msg_|resp_|req_|rs_|fc_|toolu_|call_|item_)[0-9a-f]{16,}", rb"\1ID"),
        (rb'"((?:created|created_at|completed_at)": ?)\d+(?:\.\d+)?', rb'"\1"TIME"'),
        (rb'"((?:encrypted_content|signature)": ?)"[^"]+"', rb'"\1"SEALED"'),
        (rb"(try again in )\d+s", rb"\1Ns"),
        (rb"(cannot be compiled to a grammar: |is not valid JSON: ).*", rb"\1..."),  # a library's words follow
    )
)


def normalised(raw: bytes) -> str:
    for pattern, replacement in _RULES:
        raw = pattern.sub(replacement, raw)
    return raw.decode()


def shape(value: Any, path: str = "") -> dict[str, str]:
    """Every key path of a JSON value with the types found there: `requests[].phase` -> `str`."""
    match value:
        case dict():
            found = {path: "object"} if path else {}
            for name, member in value.items():
                _merge(found, shape(member, f"{path}.{name}" if path else name))
            return found
        case list():
            found = {path: "list"}
            for item in value:
                _merge(found, shape(item, f"{path}[]"))
            return found
        case None:
            return {path: "null"}
        case _:
            return {path: type(value).__name__}


def _merge(found: dict[str, str], others: dict[str, str]) -> None:
    for path, kind in others.items():
        kinds = {*found.get(path, kind).split(" or "), *kind.split(" or ")}
        found[path] = " or ".join(sorted(kinds))


_PIECES = frozenset(
    {"content", "reasoning_content", "reasoning", "text", "thinking", "delta", "arguments", "partial_json"}
)


def joined(stream: str) -> str:
    """A stream of events in which neighbours that differ in a piece of text only are one: where it is cut is chance.

    Reasoning comes in two events of Responses that take turns, so the last two are looked at.
    """
    events: list[tuple[str, Any]] = []
    for event in stream.strip().split("\n\n"):
        head, _, data = event.rpartition("data: ")
        value = json.loads(data) if data.startswith("{") else data
        if isinstance(value, dict):
            value.pop("sequence_number", None)
        same = [
            at for at in range(len(events))[-2:] if events[at][0] == head and _frame(events[at][1]) == _frame(value)
        ]
        if same and _frame(value) != value:
            events[same[0]] = (head, _together(events[same[0]][1], value))
        else:
            events.append((head, value))
    return "\n\n".join(f"{head}data: {json.dumps(value, ensure_ascii=False)}" for head, value in events)


def _frame(value: Any) -> Any:
    """All but the pieces of text."""
    match value:
        case dict():
            return {k: "" if k in _PIECES and v and isinstance(v, str) else _frame(v) for k, v in value.items()}
        case list():
            return [_frame(item) for item in value]
        case _:
            return value


def _together(first: Any, second: Any) -> Any:
    match first:
        case dict():
            return {k: v + second[k] if k in _PIECES and isinstance(v, str) else _together(v, second[k])
                    for k, v in first.items()}  # fmt: skip
        case list():
            return [_together(*pair) for pair in zip(first, second, strict=True)]
        case _:
            return first
