"""API keys, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. Knows no route but those that stay open."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.api_key import APIKey
from .error_handlers import http_error

# The page asks for the key itself, and all that it shows; clients probe the others before they send one.
OPEN_PATHS = frozenset({"/", "/health", "/api/hello"})
METRICS_PATH = "/metrics"
NO_KEY = "Send a valid API key: `Authorization: Bearer KEY` or `x-api-key: KEY`."


class APIKeyAuth:
    """Answers 401 to any request without a right key, but for the open paths. Says whose request a right one is.

    With admin keys alone, requests without one are answered too: they manage nothing.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Iterable[APIKey], open_paths: Iterable[str] = ()) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS | frozenset(open_paths)
        self._keys = [(_digest(key.secret.encode()), key) for key in api_keys]
        self._asks_for_key = any(not key.is_admin for _, key in self._keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        digest = _digest(_given_key(scope))
        key = self._key_of(digest)
        if key is not None or not self._asks_for_key:
            state = scope.setdefault("state", {})
            state["is_admin"] = False
            if key is not None:
                state["tenant"], state["key_name"], state["priority"] = digest.hex(), key.name, key.priority
                state["is_admin"] = key.is_admin or len(self._keys) == 1
            await self._app(scope, receive, send)
            return
        response = http_error(scope["path"], 401, NO_KEY)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _key_of(self, given: bytes) -> APIKey | None:
        # All digests have one length and all are compared, each in constant time: timing tells nothing.
        matches = [key for digest, key in self._keys if hmac.compare_digest(given, digest)]
        return matches[0] if matches else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"vllm-mlx key " + key).digest()


def _given_key(scope: Scope) -> bytes:
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1")
