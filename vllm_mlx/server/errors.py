"""Errors → responses. The one place that knows which envelope answers which request."""

import math
from typing import cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..api.openai.errors import HTTPError, encode_error, encode_status, encode_validation
from ..core.errors import VLLMMLXError

CLIENT_GONE = 499


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


def error_code(error: VLLMMLXError) -> str | None:
    """The stable word for this error, as clients and the log get it."""
    return encode_error(error).body.error.code


def respond(error: HTTPError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(error.body.to_json(), error.status, headers, media_type="application/json")


def http_error(status: int, message: str) -> Response:
    return respond(HTTPError(status, encode_status(status, message)))


def internal_error(request_id: str) -> Response:
    return http_error(500, f"The server failed on this request. Its log tells more under {request_id}.")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(VLLMMLXError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)


async def _on_error(request: Request, error: Exception) -> Response:
    encoded = encode_error(cast(VLLMMLXError, error))
    request.state.record.error_code = encoded.body.error.code
    return respond(encoded)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    invalid = cast(RequestValidationError, error)
    first, *_ = errors = invalid.errors()
    if first["type"] == "json_invalid":
        return http_error(400, f"The request body is not valid JSON: {first['ctx']['error']}.")
    if isinstance(invalid.body, bytes):
        return http_error(400, "Send the request body as JSON, with the header `Content-Type: application/json`.")
    # The location starts with "body", which is the whole of what clients send.
    inside = [{**each, "loc": each["loc"][1:]} for each in errors]
    return respond(HTTPError(400, encode_validation(inside, invalid.body)))


async def _on_http_error(request: Request, error: Exception) -> Response:
    found = cast(HTTPException, error)
    match found.status_code:
        case 404:
            message = f"There is no {request.method} {request.url.path} here."
        case 405:
            message = f"{request.url.path} does not take {request.method}."
        case _:
            message = str(found.detail)
    response = http_error(found.status_code, message)
    response.headers.update(found.headers or {})
    return response


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
