"""Limits on connections: how slowly clients may send and read, how much they may send, how many there may be.

Knows no route.
"""

import asyncio
import logging
import resource
from typing import Any

from starlette.responses import Response
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..core.errors import TooManyRequests, setting
from .config import ConnectionLimits
from .error_handlers import envelope_of, http_error, respond

logger = logging.getLogger(__name__)
HARD_FACTOR = 2  # connections beyond this multiple of the limit are closed without an answer
BUSY_S = 5.0  # `retry-after` if all connections are in use
OPEN_FILES = 8192  # each connection is an open file, and macOS allows 256 by default
OPEN_PATHS = frozenset({"/health"})
MAX_HEADERS = 256  # headers of one request, including trailers


class StopParser(Exception):
    """Raised inside a callback of the parser, which then reads no further."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on a client's data, and time limits on requests and replies.

    A client sends one request at a time. If another one arrives before the reply has ended, the connection closes after
    this reply.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._clock: asyncio.TimerHandle | None = None
        self._write_clock: asyncio.TimerHandle | None = None
        self._num_marks = 0  # headers, pieces of bodies and requests that the parser has completed
        self._num_open_bytes = 0  # received since the last of them, so inside one block of headers or the like
        self._takes_requests = True
        self._stopped_by: StopParser | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > HARD_FACTOR * self._limits.max_connections:
            transport.abort()
            return
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._stop_write_clock()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_clock = self.loop.call_later(self._limits.take_s, self._on_write_timeout)

    def resume_writing(self) -> None:
        self._stop_write_clock()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if not self._takes_requests:
            return
        if self._clock is None and (self.cycle is None or self.cycle.response_complete):
            self._start_clock()  # blank lines before a request do not start it
        num_marks = self._num_marks
        super().data_received(data)
        self._num_open_bytes = self._num_open_bytes + len(data) if num_marks == self._num_marks else 0
        if self._num_open_bytes > self._limits.max_header_bytes:
            self._stop_taking(431, too_long(self._limits.max_header_bytes))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._stop_parser(431, f"The request has more than {MAX_HEADERS} headers.")

    def on_headers_complete(self) -> None:
        self._stop_clock()
        self._num_marks += 1
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_taking(400, "A request was sent before the reply to an earlier one had ended.")
            return
        self.scope["state"]["num_connections"] = len(self.connections)
        self.scope["state"]["header_bytes"] = self._num_header_bytes()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_marks += 1
        if self._takes_requests:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_marks += 1
        if self._takes_requests:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request at which the parser has stopped. uvicorn calls this."""
        stopped_by = self._stopped_by
        self._stop_taking(*((400, msg) if stopped_by is None else (stopped_by.status, str(stopped_by))))

    def _num_header_bytes(self) -> int:
        """Return the length of the request line and the headers on the wire, written as `name: value`."""
        line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n")
        return line + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def _stop_parser(self, status: int, message: str) -> None:
        self._stopped_by = StopParser(status, message)
        raise self._stopped_by

    def _stop_taking(self, status: int, message: str) -> None:
        """Refuse the data that arrives, and close. If a reply to a complete request is running, only close after it."""
        if self.transport.is_closing():
            return
        self._takes_requests = False
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(status, message)
        elif not self.cycle.more_body:
            logger.info("%s The connection closes after this reply.", message)
            self.cycle.keep_alive = False
        elif self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(status, message)

    def _start_clock(self) -> None:
        self._clock = self.loop.call_later(self._limits.head_s, self._on_head_timeout)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _stop_write_clock(self) -> None:
        if self._write_clock is not None:
            self._write_clock.cancel()
            self._write_clock = None

    def _on_write_timeout(self) -> None:
        """Close the connection: its requests are aborted as after a disconnect."""
        self._write_clock = None
        logger.info("A client read nothing for %g seconds: its connection was closed", self._limits.take_s)
        self.transport.abort()

    def _on_head_timeout(self) -> None:
        self._clock = None
        self._refuse(408, f"The request's headers did not come within {self._limits.head_s:g} seconds.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer before the path is known, with OpenAI's envelope, and close the connection."""
        self._takes_requests = False
        response = http_error({"path": "/"}, status, message)
        head = [f"HTTP/1.1 {status} -".encode(), *(b": ".join(header) for header in response.raw_headers)]
        self.transport.write(b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)]))
        self.transport.close()


def too_long(max_header_bytes: int) -> str:
    return f"The request's headers are longer than {max_header_bytes} bytes."


def refuse_connection(limits: ConnectionLimits, scope: Scope) -> Response | None:
    """Return the refusal of a request if there are too many connections or its headers are too long, else None."""
    state = scope.get("state", {})
    if state.get("header_bytes", 0) > limits.max_header_bytes:
        response = http_error(scope, 431, too_long(limits.max_header_bytes))
    elif state.get("num_connections", 0) > limits.max_connections and scope["path"] not in OPEN_PATHS:
        message = f"The server has {limits.max_connections} connections, the maximum ({setting('max_connections')})."
        response = respond(envelope_of(scope["path"]).error(TooManyRequests(message, retry_after_s=BUSY_S)), scope)
    else:
        return None
    response.headers["connection"] = "close"
    return response


def allow_open_files() -> None:
    """Raise the limit of open files, so that all connections fit, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
