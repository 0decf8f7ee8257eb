"""Errors → HTTP status and OpenAI's envelope. Never reads an error's text."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import (
    Cancelled,
    EngineDead,
    GrammarLimit,
    ModelNotFound,
    Overloaded,
    RequestError,
    TimeLimit,
    TooManyRequests,
    VLLMMLXError,
)
from ..errors import CANCELLED, CANCELLED_STATUS, HTTPError
from ..validation import describe
from .replies import ErrorDetail, ErrorReply

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
UNKNOWN = "unknown_parameter"  # the client's own word


class OpenAIErrors:
    """`api.errors.ErrorEncoder`. `renamed`: parameters of a request that this endpoint knows by another name."""

    def __init__(self, renamed: Mapping[str, str] | None = None) -> None:
        self._renamed = renamed or {}

    def error(self, error: VLLMMLXError) -> HTTPError:
        return encode_error(error, self._renamed)

    def status(self, status: int, message: str) -> HTTPError:
        reply = encode_status(status, message)
        return HTTPError(status, reply, reply.error.code)

    def validation(self, errors: Sequence[Mapping[str, Any]], body: Any) -> HTTPError:
        reply = encode_validation(errors, body)
        return HTTPError(400, reply, reply.error.code)


def encode_error(error: VLLMMLXError, renamed: Mapping[str, str] | None = None) -> HTTPError:
    detail = error_detail(error)
    if renamed and detail.param is not None and detail.code != UNKNOWN:
        detail.param = renamed.get(detail.param, detail.param)
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return HTTPError(_status(error), ErrorReply(error=detail), detail.code, retry_after_s)


def error_detail(error: VLLMMLXError) -> ErrorDetail:
    message = error.message
    match error:
        case TooManyRequests():
            return _detail(message, "rate_limit_error", code=error.code)
        case Overloaded():
            return _detail(message, "overloaded_error", code=error.code)
        case ModelNotFound():
            return _detail(message, INVALID_REQUEST, param="model", code=error.code)
        case RequestError() | GrammarLimit():
            return _detail(message, INVALID_REQUEST, param=error.param, code=error.code)
        case Cancelled():
            return _detail(message, INVALID_REQUEST, code=CANCELLED)
        case EngineDead():
            return _detail(message, SERVER_ERROR, code="engine_dead")
        case _:
            return _detail(message, SERVER_ERROR, code="generation_failed")


def encode_status(status: int, message: str) -> ErrorReply:
    """For errors that HTTP itself found: unknown route, wrong method, no key, too large, too much, our own bug."""
    if status == 429:
        return ErrorReply(error=_detail(message, "rate_limit_error", code="rate_limit_exceeded"))
    codes = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    if status >= 500:
        return ErrorReply(error=_detail(message, SERVER_ERROR, code="internal_error"))
    return ErrorReply(error=_detail(message, INVALID_REQUEST, code=codes.get(status)))


def encode_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ErrorReply:
    """`errors` as pydantic lists them, `loc` starting inside `body`."""
    invalid = describe(errors, body)
    return ErrorReply(error=_detail(invalid.message, INVALID_REQUEST, param=invalid.param, code=invalid.code))


def _status(error: VLLMMLXError) -> int:
    match error:
        case ModelNotFound():
            return 404
        case Cancelled():
            return CANCELLED_STATUS
        case TimeLimit():
            return 422
        case TooManyRequests():
            return 429
        case Overloaded() | EngineDead():
            return 503
        case RequestError() | GrammarLimit():
            return 400
        case _:
            return 500


def _detail(message: str, type_: str, *, param: str | None = None, code: str | None = None) -> ErrorDetail:
    return ErrorDetail(message=message, type=type_, param=param, code=code)
