"""Serves an application on a socket until Ctrl-C, SIGTERM or SIGHUP. Knows nothing of what is served."""

import asyncio
import errno
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from ..core.errors import ConfigError, EngineDead, setting
from .config import ConnectionLimits
from .connection import GuardedProtocol, allow_open_files
from .garbage import GarbageCollector
from .interfaces import Engine

logger = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KEEP_CONNECTION_S = 75  # agents pause between requests; a connection closed under a request is an error to them
LAST_WORDS_S = 1  # for clients and supervisors to hear why, once the engine has died
LAST_EVENTS_S = 5  # for streams to send their last event once the engine has stopped
# A thread that computes lets others run after this time: the event loop may wait so long after each call into the
# system. Half of it costs a small model a tenth of its speed.
SWITCH_S = 0.002


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port in use shows before a model is loaded. Port 0 takes a free one.

    Raises ConfigError.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # "localhost" is two addresses; clients that know one know this one.
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(_why_not(error, host, port)) from error


def _why_not(error: OSError, host: str, port: int) -> str:
    match error:
        case socket.gaierror() | OSError(errno=errno.EADDRNOTAVAIL):
            return (
                f"{setting('host')} {host} is not an address of this machine. Use 127.0.0.1, or 0.0.0.0 for the "
                "network."
            )
        case OSError(errno=errno.EADDRINUSE):
            return (
                f"Port {port} on {host} is taken. Choose another with {setting('port')}, or stop the program that "
                "holds it."
            )
        case OSError(errno=errno.EACCES):
            return f"Port {port} needs administrator rights. Choose one above 1023 with {setting('port')}."
        case _:
            return f"Cannot listen on {host}, port {port}: {error.strerror}."


def run(
    app: ASGIApp,
    engine: Engine,
    sock: socket.socket,
    *,
    drain_s: float,
    started: Callable[[], None] | None = None,
    connections: ConnectionLimits | None = None,
) -> None:
    """Returns after Ctrl-C, SIGTERM or SIGHUP: running replies have had `drain_s` to finish. A second Ctrl-C or SIGTERM
    ends them at once.

    `started` is called when the first request can come. Raises EngineDead where the engine ended by itself: the process
    is of no use any more, and whatever supervises it can start another.
    """
    allow_open_files()
    sys.setswitchinterval(SWITCH_S)
    garbage = GarbageCollector()
    garbage.begin()
    server = EngineServer(app, engine, drain_s=drain_s, started=started, connections=connections, tick=garbage.tick)
    server.run(sockets=[sock])
    garbage.end()
    if engine.is_dead:
        raise EngineDead(engine.error() or "The engine has stopped.")


class EngineServer(uvicorn.Server):
    """Ends the engine's work before the connections: so every stream gets its last event, and nothing is cancelled."""

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        *,
        drain_s: float,
        started: Callable[[], None] | None = None,
        connections: ConnectionLimits | None = None,
        tick: Callable[[], None] | None = None,
    ) -> None:
        """`tick` is called ten times a second."""
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(GuardedProtocol, limits=connections or ConnectionLimits())),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_CONNECTION_S,
            timeout_graceful_shutdown=LAST_EVENTS_S,
        )
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s
        self._on_start = started
        self._tick = tick
        self._died_s: float | None = None
        self._stopped_by: signal.Signals | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again in the end, and so end the process by it instead of with exit code 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        taken = [each for each in STOP_SIGNALS if not (each == signal.SIGHUP and has_nohup)]
        before = {each: signal.signal(each, self.handle_exit) for each in taken}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopped_by is None:
            self._stopped_by = signal.Signals(sig)
        elif sig != signal.SIGHUP:  # a terminal that closes may send it twice
            self.force_exit = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks ten times a second whether to go on."""
        should_exit = await super().on_tick(counter)
        if self._tick is not None:
            self._tick()
        if self._engine.is_dead and self._died_s is None:
            self._died_s = time.monotonic()
        else:
            self._engine.error()  # so that the watchdog speaks though nobody asks
        return should_exit or (self._died_s is not None and time.monotonic() - self._died_s >= LAST_WORDS_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_start is not None:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._stopped_by is not None:
            logger.info("%s: running replies get %g seconds to finish", self._stopped_by.name, self._drain_s)
        drain = asyncio.create_task(self._engine.shutdown(self._drain_s))
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.1)
        if not drain.done():
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
            await self._engine.shutdown(0)
        self.force_exit = False  # the engine is done: what remains is the last event of each stream
        await super().shutdown(sockets)
