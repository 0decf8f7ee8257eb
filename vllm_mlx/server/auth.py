"""API keys, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`."""

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import http_error

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json", "/api/hello"})
NO_KEY = "Send a valid API key: `Authorization: Bearer KEY` or `x-api-key: KEY`."


class APIKeyAuth:
    """Answers 401 to any request without a right key, but for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, *, api_keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(_given_key(scope)):
            await self._app(scope, receive, send)
            return
        response = http_error(scope["path"], 401, NO_KEY)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _is_allowed(self, given: bytes) -> bool:
        # Every key is compared, each in constant time, so that timing tells nothing.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def _given_key(scope: Scope) -> bytes:
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1")
