"""Connections that send or take too slowly, send too much, or are too many. Knows no route."""

import asyncio
import logging
import resource
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..core.errors import ConfigError, TooManyRequests
from .errors import envelope_of, http_error, respond

logger = logging.getLogger(__name__)
HARD_FACTOR = 2  # connections beyond so many times the limit are closed unanswered
BUSY_S = 5.0  # for a client that finds all connections taken
OPEN_FILES = 8192  # connections are files, and macOS begins with 256
OPEN_PATHS = frozenset({"/health"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_connections: int = 1000
    max_header_bytes: int = 64 * 1024
    head_s: float = 30.0  # for a request's headers to come, from the first byte or the connection on
    take_s: float = 30.0  # for a client to take what is written, once its buffers and ours are full

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_header_bytes", "head_s", "take_s"):
            if getattr(self, name) <= 0:
                flag = "--slow-client-s" if name.endswith("_s") else f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be greater than 0.")

    def protocol(self) -> Any:
        """What uvicorn calls for each connection."""
        return partial(GuardedProtocol, limits=self)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's own protocol, with a clock and a count on requests that are not whole yet, and a clock on replies."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._clock: asyncio.TimerHandle | None = None
        self._take_clock: asyncio.TimerHandle | None = None
        self._reads_head = True
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > HARD_FACTOR * self._limits.max_connections:
            transport.abort()
            return
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._stop_take_clock()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._take_clock = self.loop.call_later(self._limits.take_s, self._is_not_taken)

    def resume_writing(self) -> None:
        self._stop_take_clock()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._clock is None and (self.cycle is None or self.cycle.response_complete):
            self._start_clock()  # blank lines before a request begin none
        super().data_received(data)
        if self._reads_head and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self._limits.max_header_bytes:
                self._refuse(431, self._too_long())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head, self._num_header_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._stop_clock()
        self._reads_head = False
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self.scope["state"]["num_connections"] = len(self.connections)
        self.scope["state"]["header_bytes"] = num_bytes
        super().on_headers_complete()

    def _start_clock(self) -> None:
        self._clock = self.loop.call_later(self._limits.head_s, self._head_is_late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _stop_take_clock(self) -> None:
        if self._take_clock is not None:
            self._take_clock.cancel()
            self._take_clock = None

    def _is_not_taken(self) -> None:
        """What is under way for the client ends as if it had gone, and what waits for it is dropped."""
        self._take_clock = None
        logger.info("A client took nothing for %g seconds: its connection was closed", self._limits.take_s)
        self.transport.abort()

    def _head_is_late(self) -> None:
        self._clock = None
        self._refuse(408, f"The request's headers did not come within {self._limits.head_s:g} seconds.")

    def _refuse(self, status: int, message: str) -> None:
        """Before there is a path, and so a protocol with an envelope of its own."""
        response = http_error("/", status, message)
        head = [f"HTTP/1.1 {status} -".encode(), *(b": ".join(header) for header in response.raw_headers)]
        self.transport.write(b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)]))
        self.transport.close()

    def _too_long(self) -> str:
        return too_long(self._limits.max_header_bytes)


def too_long(max_header_bytes: int) -> str:
    return f"The request's headers are longer than {max_header_bytes} bytes."


class ConnectionGate:
    """Answers requests on connections that are too many, or whose headers are too long."""

    def __init__(self, app: ASGIApp, *, limits: ConnectionLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        if state.get("header_bytes", 0) > self._limits.max_header_bytes:
            response = http_error(scope["path"], 431, too_long(self._limits.max_header_bytes))
        elif state.get("num_connections", 0) > self._limits.max_connections and scope["path"] not in OPEN_PATHS:
            message = f"The server holds {self._limits.max_connections} connections already (--max-connections)."
            error = TooManyRequests(message, retry_after_s=BUSY_S)
            response = respond(envelope_of(scope["path"]).error(error))
        else:
            await self._app(scope, receive, send)
            return
        response.headers["connection"] = "close"
        await response(scope, receive, send)


def allow_open_files() -> None:
    """As many as there may be connections, where the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
