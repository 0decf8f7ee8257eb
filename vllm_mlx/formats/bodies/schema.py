"""Which JSON value a written text stands for, by the types that a schema allows."""

import re

from .json_scanner import json_value
from .tool_schema import STRING, Types

_MAX_SCALAR = 64  # characters; a longer number or margin is text
_INTEGER_VALUED = re.compile(r"(-?\d+)(?:\.0+)?\Z", re.ASCII)
_MAYBE_SCALAR = re.compile(
    r"(?:[-+.\deE]*|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?|T(?:r(?:ue?)?)?|F(?:a(?:l(?:se?)?)?)?)\Z",
    re.ASCII,
)


def may_be_value(text: str, types: Types) -> bool:
    """Whether a text that begins like this can still stand for something else than itself."""
    if types == STRING:
        return False
    start = text[: _MAX_SCALAR + 1].lstrip()
    if not start:
        return len(text) <= _MAX_SCALAR
    if start[0] in "{[":
        return True
    rest = text.strip()
    return len(rest) <= _MAX_SCALAR and _MAYBE_SCALAR.match(rest) is not None


def decode(text: str, types: Types) -> str | None:
    """The JSON value that `text` stands for, or None where it is a string.

    A value of a type that the schema does not allow is kept where the schema allows no string either; null is not.
    """
    if not may_be_value(text, types):
        return None
    text = text.strip()
    if types is not None and "boolean" in types and text in ("True", "False"):
        return text.lower()
    value = json_value(text)
    if value is None:
        return None
    kind = _kind(value)
    if types is None:
        return None if kind == "string" else value
    if kind == "number" and types & {"number", "integer"}:
        whole = _INTEGER_VALUED.match(value)
        return whole.group(1) if whole else value if "number" in types or "string" not in types else None
    return value if kind in types or not ({"string"} & types or kind in ("null", "string")) else None


def _kind(value: str) -> str:
    match value[0]:
        case "{":
            return "object"
        case "[":
            return "array"
        case '"':
            return "string"
        case "t" | "f":
            return "boolean"
        case "n":
            return "null"
    return "number"
