"""A body that does not match the wire types → one sentence that names the field. Knows no envelope."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import shown

# Codes by pydantic's error types.
_CODES = {
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "union_tag_invalid": "unsupported_value",
    "literal_error": "unsupported_value",
    "greater_than": "invalid_value",
    "greater_than_equal": "invalid_value",
    "less_than_equal": "invalid_value",
    "too_long": "invalid_value",
    "too_short": "invalid_value",
    "string_too_short": "invalid_value",
    "string_too_long": "invalid_value",
}
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}


@dataclass(frozen=True, slots=True)
class Invalid:
    message: str
    param: str | None
    code: str


def describe(errors: Sequence[Mapping[str, Any]], body: Any) -> Invalid:
    """`errors` as pydantic lists them, `loc` starting inside `body`."""
    if not isinstance(body, dict):
        return Invalid("The request body must be a JSON object.", None, "invalid_type")
    # A union reports every branch that failed; the branch that matched furthest is the one that the client meant.
    error = max(errors, key=lambda found: len(found["loc"]))
    path = _path(error, body)
    others = [other for other in errors if len(other["loc"]) == len(error["loc"]) and _path(other, body) == path]
    return Invalid(_sentence(error, path, others), path, _CODES.get(error["type"], "invalid_type"))


def _path(error: Mapping[str, Any], body: Any) -> str:
    """The path of the error in the input. Unlike `loc`, it leaves out the names of union branches."""
    path, value = "", body
    loc = error["loc"]
    for step, following in zip(loc, (*loc, None)[1:], strict=True):
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(step, str) and isinstance(value, dict) and step in value:
            if value.get("type") == step and following in value:
                continue  # a branch, although the value has a field of the same name
            path, value = _join(path, shown(step)), value[step]
    match error:
        case {"type": "missing", "loc": loc}:
            return _join(path, str(loc[-1]))
        case {"type": "union_tag_invalid" | "union_tag_not_found", "ctx": {"discriminator": name}}:
            return _join(path, name.strip("'"))
        case _:
            return path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _sentence(error: Mapping[str, Any], path: str, alternatives: Sequence[Mapping[str, Any]]) -> str:
    match error:
        case {"type": "missing" | "union_tag_not_found"}:
            return f"`{path}` is required."
        case {"type": "union_tag_invalid", "ctx": {"tag": tag, "expected_tags": expected}}:
            return f"`{path}` '{shown(tag)}' is not supported. Supported: {expected}."
        case {"type": "too_short" | "string_too_short"}:
            return f"`{path}` must not be empty."
        case {"type": "too_long", "ctx": {"max_length": most}}:
            return f"`{path}` must have at most {most} fields."
        case {"type": "string_too_long", "ctx": {"max_length": most}}:
            return f"`{path}` must have at most {most} characters."
        case _:
            wanted = dict.fromkeys(
                _WANTED.get(other["type"], other["msg"].removeprefix("Input should be ")) for other in alternatives
            )
            return f"`{path}` must be {' or '.join(wanted)}."
