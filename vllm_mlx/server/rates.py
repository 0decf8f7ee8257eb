"""How many requests a minute one client may send: the holder of a key, or an address where no key is asked for."""

import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import TooManyRequests, setting
from .error_handlers import envelope_of, respond
from .log import record_of
from .tenants import tenant_of

MAX_CLIENTS = 10_000  # remembered; the longest silent is forgotten, and may send as one that is new


class RateLimit:
    """Answers 429 with `retry-after` to what comes too soon. Only POST requests are counted: they ask for work."""

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
        """Seconds to wait; 0 where the request may come in."""
        now = self._clock()
        left, at_s = self._left.pop(client, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - at_s) * self._per_minute / 60)
        may_come = left >= 1
        self._left[client] = (left - 1 if may_come else left, now)
        if len(self._left) > MAX_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if may_come else (1 - left) * 60 / self._per_minute
