"""Errors → HTTP status and Anthropic's envelope. Never reads an error's text."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import (
    Cancelled,
    ContextLengthExceeded,
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
API_ERROR = "api_error"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class AnthropicErrors:
    """`api.errors.ErrorEncoder`."""

    def error(self, error: VLLMMLXError) -> HTTPError:
        return encode_error(error)

    def status(self, status: int, message: str) -> HTTPError:
        kind = _TYPES.get(status, API_ERROR if status >= 500 else INVALID_REQUEST)
        return HTTPError(status, _envelope(kind, message), kind)

    def validation(self, errors: Sequence[Mapping[str, Any]], body: Any) -> HTTPError:
        invalid = describe(errors, body)
        return HTTPError(400, _envelope(INVALID_REQUEST, invalid.message), invalid.code)


def encode_error(error: VLLMMLXError) -> HTTPError:
    match error:
        case ContextLengthExceeded():
            return HTTPError(400, _envelope(INVALID_REQUEST, _too_long(error)), error.code)
        case TooManyRequests(retry_after_s=retry_after_s):
            return HTTPError(429, _envelope("rate_limit_error", error.message), error.code, retry_after_s)
        case Overloaded(retry_after_s=retry_after_s):
            return HTTPError(503, _envelope("overloaded_error", error.message), error.code, retry_after_s)
        case ModelNotFound():
            return HTTPError(404, _envelope("not_found_error", error.message), error.code)
        case TimeLimit():  # clients send again what is refused with 408
            return HTTPError(422, _envelope(INVALID_REQUEST, error.message), error.code)
        case RequestError() | GrammarLimit():
            return HTTPError(400, _envelope(INVALID_REQUEST, error.message), error.code)
        case Cancelled():
            return HTTPError(CANCELLED_STATUS, _envelope(INVALID_REQUEST, error.message), CANCELLED)
        case EngineDead():
            return HTTPError(503, _envelope(API_ERROR, error.message), "engine_dead")
        case _:
            return HTTPError(500, _envelope(API_ERROR, error.message), "generation_failed")


def _too_long(error: ContextLengthExceeded) -> str:
    """The words by which Claude Code knows that it must compact the conversation."""
    return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_model_len} maximum"


def _envelope(kind: str, message: str) -> ErrorReply:
    return ErrorReply(type="error", error=ErrorDetail(type=kind, message=message))
