"""Errors → HTTP status and reply, in OpenAI's envelope and in Anthropic's. Never reads an error's text."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..core import errors as core
from .replies import ErrorText, Reply, given

INVALID_REQUEST, SERVER_ERROR, API_ERROR = "invalid_request_error", "server_error", "api_error"
RATE_LIMIT, OVERLOADED = "rate_limit_error", "overloaded_error"
UNKNOWN_PARAMETER = "unknown_parameter"
SHUTTING_DOWN = core.ShuttingDown.code
UNTHREADED = "thread_unsupported_request"  # Anthropic's package then sends the complete conversation

# Codes by pydantic's error types.
_CODES = {
    **dict.fromkeys(("missing", "union_tag_not_found"), "missing_required_parameter"),
    **dict.fromkeys(("literal_error", "union_tag_invalid"), "unsupported_value"),
    **dict.fromkeys(("greater_than", "greater_than_equal", "less_than_equal"), "invalid_value"),
    **dict.fromkeys(("too_long", "too_short", "string_too_short", "string_too_long"), "invalid_value"),
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


def describe(errors: Sequence[Mapping[str, Any]], body: Any) -> core.InvalidParameter:
    """Return the error of a body that does not match the wire types, in one sentence that names the field.

    `errors` as pydantic lists them, `loc` starting inside `body`.
    """
    if not isinstance(body, dict):
        return core.InvalidParameter("The request body must be a JSON object.", code="invalid_type")
    # A union reports every branch that failed; the branch that matched furthest is the one that the client meant.
    error = max(errors, key=lambda found: len(found["loc"]))
    path = _path(error, body)
    others = [other for other in errors if len(other["loc"]) == len(error["loc"]) and _path(other, body) == path]
    code = _CODES.get(error["type"], "invalid_type")
    return core.InvalidParameter(_sentence(error, path, others), param=path, code=code)


def _path(error: Mapping[str, Any], body: Any) -> str:
    """Return the path of the error in the input. Unlike `loc`, it leaves out the names of union branches."""
    path, value = "", body
    loc = error["loc"]
    for step, following in zip(loc, (*loc, None)[1:], strict=True):
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(step, str) and isinstance(value, dict) and step in value:
            if value.get("type") == step and following in value:
                continue  # a branch, although the value has a field of the same name
            path, value = _join(path, core.shown_field(step)), value[step]
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
            return f"`{path}` '{core.shown(tag)}' is not supported. Supported: {expected}."
        case {"type": "too_short" | "string_too_short"}:
            return f"`{path}` must not be empty."
        case {"type": "too_long", "ctx": {"max_length": most}}:
            return f"`{path}` must have at most {most} fields."
        case {"type": "string_too_long", "ctx": {"max_length": most}}:
            return f"`{path}` must have at most {most} characters."
        case _:
            wanted = [_WANTED.get(each["type"], each["msg"].removeprefix("Input should be ")) for each in alternatives]
            return f"`{path}` must be {' or '.join(dict.fromkeys(wanted))}."


@dataclass(frozen=True, slots=True)
class _Kind:
    """The report of errors of one kind: status, OpenAI's type, Anthropic's type, and a stable code.

    `code` is None if the error has its own. `response_code` is the code in a response of the Responses API:
    clients retry after `rate_limit_exceeded`, do not after `context_length_exceeded` and `invalid_prompt`, and take
    any other for the server's fault.
    """

    status: int
    openai: str
    anthropic: str
    code: str | None = None
    response_code: str = SERVER_ERROR


_NOT_AGAIN, _TOO_LONG = "invalid_prompt", "context_length_exceeded"
# The first class that matches an error applies. Clients repeat requests that fail with 5xx, 408, 409 or 429.
_BY_CLASS: tuple[tuple[type[core.VLLMMLXError], _Kind], ...] = (
    (core.TooManyRequests, _Kind(429, RATE_LIMIT, RATE_LIMIT, response_code="rate_limit_exceeded")),
    (core.ShuttingDown, _Kind(503, OVERLOADED, OVERLOADED, response_code=SHUTTING_DOWN)),
    (core.Overloaded, _Kind(503, OVERLOADED, OVERLOADED, response_code="rate_limit_exceeded")),
    (core.ModelNotFound, _Kind(404, INVALID_REQUEST, "not_found_error", response_code=_NOT_AGAIN)),
    (core.ModelBusy, _Kind(409, INVALID_REQUEST, INVALID_REQUEST)),
    (core.ItemNotFound, _Kind(404, INVALID_REQUEST, "not_found_error", response_code=_NOT_AGAIN)),
    (core.TimeLimit, _Kind(422, INVALID_REQUEST, INVALID_REQUEST, response_code=_NOT_AGAIN)),
    (core.ContextLengthExceeded, _Kind(400, INVALID_REQUEST, INVALID_REQUEST, response_code=_TOO_LONG)),
    (core.RequestError, _Kind(400, INVALID_REQUEST, INVALID_REQUEST, response_code=_NOT_AGAIN)),
    (core.GrammarLimit, _Kind(400, INVALID_REQUEST, INVALID_REQUEST, response_code=_NOT_AGAIN)),
    (core.Cancelled, _Kind(499, INVALID_REQUEST, INVALID_REQUEST, "request_cancelled", _NOT_AGAIN)),
    (core.EngineDead, _Kind(503, SERVER_ERROR, API_ERROR, "engine_dead")),
    (core.VLLMMLXError, _Kind(500, SERVER_ERROR, API_ERROR, "generation_failed")),
)

_BY_STATUS = {
    401: _Kind(401, INVALID_REQUEST, "authentication_error", "invalid_api_key"),
    403: _Kind(403, INVALID_REQUEST, "permission_error"),
    404: _Kind(404, INVALID_REQUEST, "not_found_error", "not_found"),
    405: _Kind(405, INVALID_REQUEST, INVALID_REQUEST, "method_not_allowed"),
    413: _Kind(413, INVALID_REQUEST, "request_too_large", "request_too_large"),
    429: _Kind(429, RATE_LIMIT, RATE_LIMIT, "rate_limit_exceeded"),
    503: _Kind(503, SERVER_ERROR, OVERLOADED, "internal_error"),
    529: _Kind(529, SERVER_ERROR, OVERLOADED, "internal_error"),
}


class OpenAIErrorDetail(Reply):
    message: ErrorText
    type: str
    param: ErrorText | None = None
    code: str | None = None


class OpenAIError(Reply):
    error: OpenAIErrorDetail


class AnthropicErrorDetails(Reply):
    error_code: str


class AnthropicErrorDetail(Reply):
    type: str
    message: ErrorText
    details: AnthropicErrorDetails | None = None


class AnthropicError(Reply):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class HTTPError:
    """An error as HTTP reports it, without the headers that HTTP itself asks for. `code` is for the log."""

    status: int
    body: OpenAIError | AnthropicError
    code: str | None = None
    retry_after_s: float | None = None


class Envelope(ABC):
    """Writes errors as the clients of one protocol read them."""

    _statuses: Mapping[int, int] = {}  # other statuses than usual for this protocol

    def error(self, error: core.VLLMMLXError) -> HTTPError:
        kind = _kind_of(error)
        param = "model" if isinstance(error, core.ModelNotFound) else getattr(error, "param", None)
        code = kind.code or getattr(error, "code", None)
        retry_after_s = error.retry_after_s if isinstance(error, core.Overloaded) else None
        status = self._statuses.get(kind.status, kind.status)
        return HTTPError(status, self._body(kind, self._message(error), param, code), code, retry_after_s)

    def status(self, status: int, message: str) -> HTTPError:
        """Return an error that HTTP itself found: unknown route, wrong method, no key, too large, our bug."""
        other = (SERVER_ERROR, API_ERROR, "internal_error") if status >= 500 else (INVALID_REQUEST, INVALID_REQUEST)
        kind = _BY_STATUS.get(status, _Kind(status, *other))
        return HTTPError(status, self._body(kind, message, None, kind.code), kind.code)

    def validation(self, errors: Sequence[Mapping[str, Any]], body: Any) -> HTTPError:
        """Return the error of an invalid body: `errors` as pydantic lists them, `loc` starting inside `body`."""
        return self.error(describe(errors, body))

    def _message(self, error: core.VLLMMLXError) -> str:
        return error.message

    @abstractmethod
    def _body(self, kind: _Kind, message: str, param: str | None, code: str | None) -> OpenAIError | AnthropicError: ...


class OpenAIEnvelope(Envelope):
    """OpenAI's envelope. `renamed`: parameters that an endpoint knows by another name. `statuses`: its own statuses."""

    def __init__(self, renamed: Mapping[str, str] | None = None, statuses: Mapping[int, int] | None = None) -> None:
        self._renamed = renamed or {}
        self._statuses = statuses or {}

    def _body(self, kind: _Kind, message: str, param: str | None, code: str | None) -> OpenAIError:
        if param is not None and code != UNKNOWN_PARAMETER:  # an unknown parameter has the name that the client gave
            param = self._renamed.get(param, param)
        return OpenAIError(error=OpenAIErrorDetail(message=message, type=kind.openai, param=param, code=code))


class AnthropicEnvelope(Envelope):
    def status(self, status: int, message: str) -> HTTPError:
        found = super().status(status, message)
        return replace(found, code=found.body.error.type)

    def _message(self, error: core.VLLMMLXError) -> str:
        """Begin with the words by which Claude Code knows that it must compact the conversation."""
        if isinstance(error, core.ContextLengthExceeded):
            return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_model_len} maximum"
        return error.message

    def _body(self, kind: _Kind, message: str, param: str | None, code: str | None) -> AnthropicError:
        details = AnthropicErrorDetails(error_code=code) if code in (UNTHREADED, SHUTTING_DOWN) else None
        error = AnthropicErrorDetail(type=kind.anthropic, message=message, **given(details=details))
        return AnthropicError(type="error", error=error)


OPENAI, ANTHROPIC = OpenAIEnvelope(), AnthropicEnvelope()


def response_code(error: core.VLLMMLXError) -> str:
    """Return the code of an error inside a response of the Responses API."""
    return _kind_of(error).response_code


def may_repeat(error: core.VLLMMLXError) -> bool:
    """Return whether a client may send the request again as it is."""
    return response_code(error) not in (_NOT_AGAIN, _TOO_LONG)


def _kind_of(error: core.VLLMMLXError) -> _Kind:
    return next(kind for error_class, kind in _BY_CLASS if isinstance(error, error_class))
