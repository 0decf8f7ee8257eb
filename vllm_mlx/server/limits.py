"""Refuses request bodies that are too long before they fill the memory, and those that come too slowly."""

import asyncio
import time

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import http_error

LEAST_BYTES_PER_S = 1024  # of a body, beyond the time that every body gets


class BodyLimit:
    """Trusts the declared length to refuse early, and counts what really comes."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_s: float = 30.0) -> None:
        """`body_s`: time for any body to come; long ones get more, at `LEAST_BYTES_PER_S`."""
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_s = body_s
        self._message = f"The request body is larger than {max_body_bytes} bytes."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            await http_error(scope["path"], 413, self._message)(scope, receive, send)
            return
        body = _Body(receive, self._max_body_bytes, self._body_s)
        await self._app(scope, body.receive, send)


class _Body:
    """One body on its way in."""

    def __init__(self, receive: Receive, max_bytes: int, patience_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._started_s: float | None = None
        self._num_bytes = 0
        self._is_whole = False

    async def receive(self) -> Message:
        """Raises HTTPException where it is too long or too slow."""
        if self._is_whole:
            return await self._receive()  # waits for the client to go, for as long as it stays
        message = await self._in_time()
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
            raise HTTPException(413, f"The request body is larger than {self._max_bytes} bytes.")
        return message

    async def _in_time(self) -> Message:
        now = time.monotonic()
        self._started_s = self._started_s or now
        deadline = self._started_s + self._patience_s + self._num_bytes / LEAST_BYTES_PER_S
        try:
            return await asyncio.wait_for(self._receive(), max(0.0, deadline - now))
        except TimeoutError:
            raise HTTPException(408, "The request body came too slowly.", {"connection": "close"}) from None
