"""Middlewares that refuse requests before a route sees them: names, API keys, rates and sizes of bodies."""

import asyncio
import hashlib
import hmac
import ipaddress
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.errors import TooManyRequests, setting, shown
from ..core.tenants import APIKey, has_room
from .error_handlers import envelope_of, http_error, respond
from .record import record_of
from .tenants import priority_of, tenant_of

ANY = "*"
_ALWAYS = frozenset({"localhost", "host.docker.internal"})  # the second is this machine's name in its containers
# The page asks for the key itself and displays nothing without it. Clients probe the others before they send a key.
OPEN_PATHS = frozenset({"/", "/health", "/api/hello"})
METRICS_PATH = "/metrics"
NO_KEY = "Send a valid API key: `Authorization: Bearer KEY` or `x-api-key: KEY`."
MAX_CLIENTS = 10_000  # the client that was silent longest is forgotten, and then treated like a new one
LEAST_BYTES_PER_S = 1024  # the lowest speed of a body that takes longer than `body_s`
BODIES = 4  # running requests may hold so many bodies of the largest size together
SMALL_BYTES = 64 * 1024  # a body of this size is always accepted
BUSY_S = 5.0  # `retry-after` if there is no room for a body
_BUSY = (
    f"The bodies of running requests take {BODIES} times {setting('max_body')} together, which is the maximum. "
    "Try again when some of these requests have ended."
)


class HostCheck:
    """Answers 403 to requests for other host names.

    A web page may point its own name at this machine. Addresses and missing names are accepted: no page can own them.
    """

    def __init__(self, app: ASGIApp, *, names: Iterable[str]) -> None:
        self._app = app
        self._names = _ALWAYS | {_bare(name) for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = [] if scope["type"] != "http" else [name for name in _asked(scope) if not self._is_ours(name)]
        if not wrong:
            await self._app(scope, receive, send)
            return
        name = shown(wrong[0])
        message = (
            f"This server does not answer to the host name `{name}`. To allow it, start the server with "
            f"{setting('allowed_host')} {name}."
        )
        await http_error(scope["path"], 403, message)(scope, receive, send)

    def _is_ours(self, name: str) -> bool:
        return name in self._names or ANY in self._names or name.endswith(".localhost") or is_address(name)


def own_names() -> tuple[str, ...]:
    """The names of this machine in its network."""
    name = _bare(socket.gethostname())
    first = name.partition(".")[0]
    return tuple(dict.fromkeys((name, first, f"{first}.local"))) if first else ()


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _asked(scope: Scope) -> list[str]:
    return [_bare(value) for value in Headers(scope=scope).getlist("host") if value]


def _bare(host: str) -> str:
    """The host without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return (name if name and ":" not in name and port.isdecimal() else host).rstrip(".")


class APIKeyAuth:
    """Answers 401 to requests without a valid API key, except on the open paths. Notes the tenant of valid keys.

    If all keys are admin keys, requests without a key are accepted too, but cannot manage the server.
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
        # All digests have the same length and all are compared in constant time, so timing reveals nothing.
        matches = [key for digest, key in self._keys if hmac.compare_digest(given, digest)]
        return matches[0] if matches else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"vllm-mlx key " + key).digest()


def _given_key(scope: Scope) -> bytes:
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1")


class RateLimit:
    """Answers 429 with `retry-after` if one client sends too many requests a minute.

    A client is an API key, or an address if no key is needed. Only POST requests count, since they cause work.
    """

    def __init__(self, app: ASGIApp, *, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._per_minute = per_minute
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (requests left, at this time)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait_s = 0.0
        if scope["type"] == "http" and scope["method"] == "POST":
            wait_s = self._take(tenant_of(scope) or (scope.get("client") or ("",))[0])
        if wait_s <= 0:
            await self._app(scope, receive, send)
            return
        error = TooManyRequests(
            f"This client may send {self._per_minute} requests a minute ({setting('max_requests_per_minute')}).",
            retry_after_s=wait_s,
        )
        record_of(scope).error_code = error.code
        await respond(envelope_of(scope["path"]).error(error))(scope, receive, send)

    def _take(self, client: str) -> float:
        """The seconds that this client must wait; 0 if the request is accepted."""
        now = self._clock()
        left, at_s = self._left.pop(client, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - at_s) * self._per_minute / 60)
        may_come = left >= 1
        self._left[client] = (left - 1 if may_come else left, now)
        if len(self._left) > MAX_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if may_come else (1 - left) * 60 / self._per_minute


class BodyLimit:
    """Refuses bodies that are too long, too slow, or too many before they fill the memory.

    The declared length is trusted only to refuse early; bytes are counted as they arrive.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_s: float = 30.0) -> None:
        """`body_s`: seconds for a body to arrive; they start again after every `LEAST_BYTES_PER_S * body_s` bytes."""
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_s = body_s
        self._held = _Held(BODIES * max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            await http_error(scope["path"], 413, _too_long(self._max_body_bytes))(scope, receive, send)
            return
        self._held.know(tenant_of(scope), priority_of(scope))
        body = _Body(receive, self._max_body_bytes, self._body_s, self._held, tenant_of(scope))
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._held.give_back(tenant_of(scope), body.num_bytes)


class _Held:
    """Bytes of the bodies of all running requests, by tenant. A body is kept until its request ends."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes: Counter[str] = Counter()
        self._priorities: dict[str, int] = {}  # by tenant

    def know(self, tenant: str, priority: int) -> None:
        self._priorities[tenant] = priority

    def take(self, tenant: str, num_bytes: int) -> bool:
        """Count the bytes. Returns whether there was room for them, or the tenant has no more than its share."""
        has_room_left = has_room(self._num_bytes, tenant, num_bytes, self._max_bytes, self._priorities)
        self._num_bytes[tenant] += num_bytes
        return has_room_left

    def give_back(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes[tenant] -= num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]


class _Body:
    """One body while it arrives."""

    def __init__(self, receive: Receive, max_bytes: int, patience_s: float, held: _Held, tenant: str) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._held = held
        self._tenant = tenant
        self._deadline_s: float | None = None
        self._num_recent = 0  # bytes since the deadline was set
        self._is_complete = False
        self.num_bytes = 0

    async def receive(self) -> Message:
        """Receive a message. Raises HTTPException if the body is too long or too slow, or there is no room for it."""
        if self._is_complete:
            return await self._receive()  # returns when the client disconnects
        message = await self._in_time()
        num_new = len(message.get("body", b""))
        self.num_bytes += num_new
        self._num_recent += num_new
        has_room = self._held.take(self._tenant, num_new)
        self._is_complete = not message.get("more_body", False)
        if self.num_bytes > self._max_bytes:
            raise HTTPException(413, _too_long(self._max_bytes))
        if not has_room and self.num_bytes > SMALL_BYTES:
            raise HTTPException(429, _BUSY, {"retry-after": f"{BUSY_S:.0f}", "connection": "close"})
        return message

    async def _in_time(self) -> Message:
        now = time.monotonic()
        if self._deadline_s is None or self._num_recent >= LEAST_BYTES_PER_S * self._patience_s:
            self._deadline_s, self._num_recent = now + self._patience_s, 0
        try:
            return await asyncio.wait_for(self._receive(), max(0.0, self._deadline_s - now))
        except TimeoutError:
            raise HTTPException(408, "The request body came too slowly.", {"connection": "close"}) from None


def _too_long(max_bytes: int) -> str:
    return f"The request body is larger than {max_bytes} bytes ({setting('max_body')})."
