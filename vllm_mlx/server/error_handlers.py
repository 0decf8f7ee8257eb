"""Errors → HTTP responses. Only this module knows which envelope each path has."""

import math
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ..api.error_replies import ANTHROPIC, OPENAI, AnthropicError, Envelope, HTTPError, OpenAIEnvelope
from ..core.errors import VLLMMLXError, shown

CLIENT_GONE = 499
NOT_FOUND = HTTPStatus.NOT_FOUND.phrase  # the router's message for an unknown path
ENCODER_PATHS = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank")
REPLY_PATHS = frozenset(
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "messages/count_tokens", "responses")
).union(ENCODER_PATHS)
_ENDPOINTS = REPLY_PATHS | {"/v1/models"}

# The first entry with the request's path or a parent of it applies; other paths have OpenAI's envelope.
_ENVELOPES: tuple[tuple[str, Envelope], ...] = (
    ("/v1/messages", ANTHROPIC),
    # Codex sends a request again after any status from 401 on.
    ("/v1/responses", OpenAIEnvelope(renamed={"messages": "input"}, statuses={422: 400, 499: 400})),
)


class ClientGone(Exception):
    """The client closed its connection; no client reads the response."""


def envelope_of(path: str) -> Envelope:
    """Return the envelope of all errors on this path."""
    for prefix, envelope in _ENVELOPES:
        if path == prefix or path.startswith(prefix + "/"):
            return envelope
    return OPENAI


def respond(error: HTTPError, scope: Scope) -> Response:
    headers = {}
    if isinstance(error.body, AnthropicError) and (record := scope.get("state", {}).get("record")) is not None:
        error.body.request_id = record.request_id
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(error.body.to_json(), error.status, headers, media_type="application/json")


def http_error(scope: Scope, status: int, message: str) -> Response:
    return respond(envelope_of(scope["path"]).status(status, message), scope)


async def answer(request: Request, error: Exception) -> Response:
    """Return the response for an error of `HANDLERS`, which is noted for the log and the status page."""
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    encoded = _encoded(request, error)
    record = request.state.record
    record.error_code, record.error_message = encoded.code, encoded.body.error.message
    response = respond(encoded, request.scope)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = dict.fromkeys(
    (VLLMMLXError, RequestValidationError, HTTPException, ClientGone), answer
)


def _encoded(request: Request, error: Exception) -> HTTPError:
    envelope = envelope_of(request.url.path)
    match error:
        case VLLMMLXError():
            return envelope.error(error)
        case RequestValidationError():
            return _invalid(envelope, error)
        case HTTPException():
            return envelope.status(error.status_code, _http_message(request, error))
    raise AssertionError("no other error has this handler") from error


def _invalid(envelope: Envelope, error: RequestValidationError) -> HTTPError:
    """Drop the first part of each location: it says where FastAPI looked, which clients do not know."""
    errors = error.errors()
    given = {found["loc"][-1]: found["input"] for found in errors}
    is_body = errors[0]["loc"][0] == "body"
    return envelope.validation(
        [{**found, "loc": found["loc"][1:]} for found in errors], error.body if is_body else given
    )


def _http_message(request: Request, error: HTTPException) -> str:
    path = request.url.path
    match error.status_code:
        case 404 if error.detail == NOT_FOUND:
            return f"There is no {request.method} {shown(path)} here.{_meant(path)}"
        case 405:
            return f"{path} does not accept {request.method}."
    return str(error.detail)


def _meant(path: str) -> str:
    """Return a hint for a path of Ollama's API, or one with a missing or doubled /v1: some clients need that in their
    base URL, others do not.
    """
    if path.startswith("/api/"):
        return " This server has no Ollama API: set the client to an OpenAI API with the base URL that ends in /v1."
    rest = path.strip("/")
    while rest.startswith(("v1/", "v2/")):
        rest = rest[len("v1/") :].lstrip("/")
    right = f"/v1/{rest}"
    return f" Did you mean {right}? Look at the client's base URL." if right in _ENDPOINTS and right != path else ""
