"""Errors → HTTP status and OpenAI's envelope. Never reads an error's text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import (
    EngineDead,
    ModelNotFound,
    Overloaded,
    RequestError,
    VLLMMLXError,
)
from .replies import ErrorDetail, ErrorReply

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

# By pydantic's error types.
_CODES = {
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "union_tag_invalid": "unsupported_value",
    "literal_error": "unsupported_value",
    "greater_than_equal": "invalid_value",
    "less_than_equal": "invalid_value",
    "too_short": "invalid_value",
    "string_too_short": "invalid_value",
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
class HTTPError:
    """Everything but the headers that HTTP itself asks for."""

    status: int
    body: ErrorReply
    retry_after_s: float | None = None


def envelope(message: str, type_: str, *, param: str | None = None, code: str | None = None) -> ErrorReply:
    return ErrorReply(error=ErrorDetail(message=message, type=type_, param=param, code=code))


def encode_error(error: VLLMMLXError) -> HTTPError:
    message = error.message
    match error:
        case Overloaded(retry_after_s=retry_after_s):
            return HTTPError(503, envelope(message, "overloaded_error", code=error.code), retry_after_s)
        case ModelNotFound():
            return HTTPError(404, envelope(message, INVALID_REQUEST, param="model", code=error.code))
        case RequestError():
            return HTTPError(400, envelope(message, INVALID_REQUEST, param=error.param, code=error.code))
        case EngineDead():
            return HTTPError(503, envelope(message, SERVER_ERROR, code="engine_dead"))
        case _:
            return HTTPError(500, envelope(message, SERVER_ERROR, code="generation_failed"))


def encode_status(status: int, message: str) -> ErrorReply:
    """For errors that HTTP itself found: unknown route, wrong method, no key, too large, our own bug."""
    codes = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    if status >= 500:
        return envelope(message, SERVER_ERROR, code="internal_error")
    return envelope(message, INVALID_REQUEST, code=codes.get(status))


def encode_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ErrorReply:
    """`errors` as pydantic lists them, `loc` starting inside `body`. Names the field in plain words."""
    if not isinstance(body, dict):
        return envelope("The request body must be a JSON object.", INVALID_REQUEST, code="invalid_type")
    # A union reports every branch that failed; the one that came furthest is what the client meant.
    error = max(errors, key=lambda each: len(each["loc"]))
    path = _path(error, body)
    others = [each for each in errors if len(each["loc"]) == len(error["loc"]) and _path(each, body) == path]
    code = _CODES.get(error["type"], "invalid_type")
    return envelope(_sentence(error, path, others), INVALID_REQUEST, param=path, code=code)


def _path(error: Mapping[str, Any], body: Any) -> str:
    """Follows `loc` through the input, which leaves out the names that pydantic gives to branches of a union."""
    path, value = "", body
    for step in error["loc"]:
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(step, str) and isinstance(value, dict) and step in value:
            path, value = _join(path, step), value[step]
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
            return f"`{path}` '{tag}' is not supported. Supported: {expected}."
        case {"type": "too_short"}:
            return f"`{path}` must not be empty."
        case _:
            wanted = dict.fromkeys(
                _WANTED.get(each["type"], each["msg"].removeprefix("Input should be ")) for each in alternatives
            )
            return f"`{path}` must be {' or '.join(wanted)}."
