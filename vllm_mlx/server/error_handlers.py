"""Errors → HTTP responses. Only this module knows which envelope each path has."""

import math
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..api.error_replies import ANTHROPIC, OPENAI, Envelope, HTTPError, OpenAIEnvelope
from ..core.errors import VLLMMLXError, shown
from .bodies import RefusedBody

CLIENT_GONE = 499
NOT_FOUND = HTTPStatus.NOT_FOUND.phrase  # the router's message for an unknown path
_ENDPOINTS = frozenset(
    f"/v1/{name}"
    for name in ("chat/completions", "completions", "messages", "messages/count_tokens", "models", "responses")
)

# The first entry counts that has the request's path or a parent of it; other paths have OpenAI's envelope.
_ENVELOPES: tuple[tuple[str, Envelope], ...] = (
    ("/v1/messages", ANTHROPIC),
    ("/v1/responses", OpenAIEnvelope(renamed={"messages": "input"})),
)


class ClientGone(Exception):
    """The client closed its connection; nobody reads the response."""


def envelope_of(path: str) -> Envelope:
    """The envelope of all errors on this path."""
    for prefix, envelope in _ENVELOPES:
        if path == prefix or path.startswith(prefix + "/"):
            return envelope
    return OPENAI


def error_code(error: VLLMMLXError) -> str | None:
    """The stable code of this error, for the log."""
    return OPENAI.error(error).code


def respond(error: HTTPError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(error.body.to_json(), error.status, headers, media_type="application/json")


def http_error(path: str, status: int, message: str) -> Response:
    return respond(envelope_of(path).status(status, message))


def internal_error(path: str, request_id: str) -> Response:
    return http_error(path, 500, f"The server failed on this request. See its log under {request_id}.")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(VLLMMLXError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(RefusedBody, _on_refused_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)


async def _on_error(request: Request, error: Exception) -> Response:
    return _answer(request, envelope_of(request.url.path).error(cast(VLLMMLXError, error)))


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    path = request.url.path
    invalid = cast(RequestValidationError, error)
    first, *_ = errors = invalid.errors()
    if first["type"] == "json_invalid":
        return _unreadable(request, f"The request body is not valid JSON: {first['ctx']['error']}.")
    if first["loc"][0] != "body":
        given = {found["loc"][-1]: found["input"] for found in errors}
        return _answer(
            request, envelope_of(path).validation([{**found, "loc": found["loc"][1:]} for found in errors], given)
        )
    # The location begins with "body", which clients do not know.
    inside = [{**found, "loc": found["loc"][1:]} for found in errors]
    return _answer(request, envelope_of(path).validation(inside, invalid.body))


async def _on_refused_body(request: Request, error: Exception) -> Response:
    refused = cast(RefusedBody, error).error
    handle = _on_error if isinstance(refused, VLLMMLXError) else _on_invalid_body
    return await handle(request, refused)


async def _on_http_error(request: Request, error: Exception) -> Response:
    found = cast(HTTPException, error)
    path = request.url.path
    match found.status_code:
        case 404 if found.detail == NOT_FOUND:
            message = f"There is no {request.method} {shown(path)} here.{_meant(path)}"
        case 405:
            message = f"{path} does not accept {request.method}."
        case _:
            message = str(found.detail)
    response = _answer_status(request, found.status_code, message)
    response.headers.update(found.headers or {})
    return response


def _unreadable(request: Request, message: str) -> Response:
    if request.headers.get("content-encoding", "identity") != "identity":
        return _answer_status(request, 415, "The request body is compressed. Send it uncompressed.")
    return _answer_status(request, 400, message)


def _answer_status(request: Request, status: int, message: str) -> Response:
    return _answer(request, envelope_of(request.url.path).status(status, message))


def _answer(request: Request, encoded: HTTPError) -> Response:
    """Build the response, and note the error for the log and the status page."""
    record = request.state.record
    record.error_code, record.error_message = encoded.code, encoded.body.error.message
    return respond(encoded)


def _meant(path: str) -> str:
    """A hint for a path with a missing or doubled /v1: some clients need it in their base URL, others do not."""
    rest = path.strip("/")
    while rest.startswith("v1/"):
        rest = rest.removeprefix("v1/").lstrip("/")
    right = f"/v1/{rest}"
    return f" Did you mean {right}? Look at the client's base URL." if right in _ENDPOINTS and right != path else ""


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
