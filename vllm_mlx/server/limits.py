"""Refuses request bodies that are too long or too many before they fill the memory, and those that come too slowly."""

import asyncio
import time
from collections import Counter

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.errors import setting
from ..core.shares import has_room
from .error_handlers import http_error
from .tenants import priority_of, tenant_of

LEAST_BYTES_PER_S = 1024  # of a body that takes longer than every body may
BODIES = 4  # of the largest size, that requests under way may hold together
SMALL_BYTES = 64 * 1024  # such a body always finds room
BUSY_S = 5.0  # for a client whose body finds no room
_BUSY = (
    f"The bodies of running requests take {BODIES} times {setting('max_body')} together, which is the maximum. "
    "Try again when some of these requests have ended."
)


class BodyLimit:
    """Trusts the declared length to refuse early, and counts what really comes."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_s: float = 30.0) -> None:
        """`body_s`: time for a body to come; that time starts again after each `LEAST_BYTES_PER_S * body_s` bytes."""
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
    """What the bodies of all running requests hold, by tenant: a body stays with its request."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes: Counter[str] = Counter()
        self._priorities: dict[str, int] = {}  # by tenant

    def know(self, tenant: str, priority: int) -> None:
        self._priorities[tenant] = priority

    def take(self, tenant: str, num_bytes: int) -> bool:
        """Whether there was room for that, or the tenant holds no more than its share."""
        has_room_left = has_room(self._num_bytes, tenant, num_bytes, self._max_bytes, self._priorities)
        self._num_bytes[tenant] += num_bytes
        return has_room_left

    def give_back(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes[tenant] -= num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]


class _Body:
    """One body on its way in."""

    def __init__(self, receive: Receive, max_bytes: int, patience_s: float, held: _Held, tenant: str) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._held = held
        self._tenant = tenant
        self._deadline_s: float | None = None
        self._num_recent = 0  # bytes since the deadline was set
        self._is_whole = False
        self.num_bytes = 0

    async def receive(self) -> Message:
        """Raises HTTPException where it is too long or too slow, or there is no room for it."""
        if self._is_whole:
            return await self._receive()  # waits for the client to go, for as long as it stays
        message = await self._in_time()
        num_new = len(message.get("body", b""))
        self.num_bytes += num_new
        self._num_recent += num_new
        has_room = self._held.take(self._tenant, num_new)
        self._is_whole = not message.get("more_body", False)
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
