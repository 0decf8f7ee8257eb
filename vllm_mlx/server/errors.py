"""Errors → responses. The one place that knows which envelope answers which request."""

import math
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..api.anthropic.errors import AnthropicErrors
from ..api.errors import ErrorEncoder, HTTPError
from ..api.openai.errors import OpenAIErrors
from ..core.errors import VLLMMLXError

CLIENT_GONE = 499
NOT_FOUND = HTTPStatus.NOT_FOUND.phrase  # what the router says of a path that it does not know

_OPENAI = OpenAIErrors()
# By the first path that is the request's or lies above it.
_ENVELOPES: tuple[tuple[str, ErrorEncoder], ...] = (
    ("/v1/messages", AnthropicErrors()),
    ("/v1/responses", OpenAIErrors(renamed={"messages": "input"})),
)


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


def envelope_of(path: str) -> ErrorEncoder:
    """The envelope that the clients of this path read, whatever it was that failed."""
    for prefix, envelope in _ENVELOPES:
        if path == prefix or path.startswith(prefix + "/"):
            return envelope
    return _OPENAI


def error_code(error: VLLMMLXError) -> str | None:
    """The stable word for this error, as the log gets it."""
    return _OPENAI.error(error).code


def respond(error: HTTPError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(error.body.to_json(), error.status, headers, media_type="application/json")


def http_error(path: str, status: int, message: str) -> Response:
    return respond(envelope_of(path).status(status, message))


def internal_error(path: str, request_id: str) -> Response:
    return http_error(path, 500, f"The server failed on this request. Its log tells more under {request_id}.")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(VLLMMLXError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)


async def _on_error(request: Request, error: Exception) -> Response:
    encoded = envelope_of(request.url.path).error(cast(VLLMMLXError, error))
    request.state.record.error_code = encoded.code
    return respond(encoded)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    path = request.url.path
    invalid = cast(RequestValidationError, error)
    first, *_ = errors = invalid.errors()
    if first["type"] == "json_invalid":
        return http_error(path, 400, f"The request body is not valid JSON: {first['ctx']['error']}.")
    if first["loc"][0] != "body":
        given = {each["loc"][-1]: each["input"] for each in errors}
        return respond(envelope_of(path).validation([{**each, "loc": each["loc"][1:]} for each in errors], given))
    if isinstance(invalid.body, bytes):
        return http_error(path, 400, "Send the request body as JSON, with the header `Content-Type: application/json`.")
    # The location starts with "body", which is the whole of what clients send.
    inside = [{**each, "loc": each["loc"][1:]} for each in errors]
    return respond(envelope_of(path).validation(inside, invalid.body))


async def _on_http_error(request: Request, error: Exception) -> Response:
    found = cast(HTTPException, error)
    path = request.url.path
    match found.status_code:
        case 404 if found.detail == NOT_FOUND:
            message = f"There is no {request.method} {path} here."
        case 405:
            message = f"{path} does not take {request.method}."
        case _:
            message = str(found.detail)
    response = http_error(path, found.status_code, message)
    response.headers.update(found.headers or {})
    return response


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
