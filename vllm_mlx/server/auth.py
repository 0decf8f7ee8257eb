"""API keys, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. Knows no route but those that stay open."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import http_error

# The page asks for the key itself, and all that it shows; clients probe the others before they send one.
OPEN_PATHS = frozenset({"/", "/health", "/api/hello"})
METRICS_PATH = "/metrics"
NO_KEY = "Send a valid API key: `Authorization: Bearer KEY` or `x-api-key: KEY`."


class APIKeyAuth:
    """Answers 401 to any request without a right key, but for the open paths. Says whose request a right one is."""

    def __init__(self, app: ASGIApp, *, api_keys: Iterable[str], open_paths: Iterable[str] = ()) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS | frozenset(open_paths)
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(api_keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        digest = _digest(_given_key(scope))
        if self._is_allowed(digest):
            state = scope.setdefault("state", {})
            state["tenant"] = digest.hex()
            state["is_only_tenant"] = state["is_admin"] = len(self._digests) == 1
            await self._app(scope, receive, send)
            return
        response = http_error(scope["path"], 401, NO_KEY)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _is_allowed(self, given: bytes) -> bool:
        # All digests have one length and all are compared, each in constant time: timing tells nothing.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"vllm-mlx key " + key).digest()


def _given_key(scope: Scope) -> bytes:
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1")
