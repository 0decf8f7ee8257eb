"""Serves an application on a socket until Ctrl-C, SIGTERM or SIGHUP. Knows no route."""

import asyncio
import errno
import gc
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
from typing import TYPE_CHECKING, Any, Self, cast

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..core.errors import ConfigError, EngineDead, ModelUnavailable, setting
from ..core.stage import LoadStage
from ..util.tasks import do_nothing
from .connection import BUSY_S, OPEN_PATHS, GuardedProtocol, allow_open_files
from .error_handlers import envelope_of, respond

if TYPE_CHECKING:  # the port is checked before anything heavy is loaded
    from ..engine.client import EngineClient
    from .request_log import OpenRequests

logger = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KEEP_CONNECTION_S = 75  # agents pause between requests, and a connection that closes during one is an error for them
LAST_ERRORS_S = 1  # clients and supervisors can read why the engine died during this time
LAST_EVENTS_S = 5  # streams can send their last event during this time, once the engine has stopped
# A thread that runs Python lets others run after this time. The engine thread waits so long after each call into MLX
# while another thread renders a prompt. At other times Python's usual interval is better, because a short one lets the
# event loop interrupt each step: a single stream then has 8 % fewer tokens a second.
SWITCH_S = 0.0005

DUE = 10  # collections of the middle generation after which Python would start a full one
MAX_OBJECTS = 500_000  # objects created since loading; a full collection of this many takes tens of milliseconds
MAX_WAIT_S = 60.0  # the longest wait for a quiet moment
_NEVER = 1 << 30


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket, so that a port in use is reported before a model is loaded. Port 0 means any free port.

    Raises ConfigError.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # "localhost" has two addresses; all clients know the IPv4 address.
        family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
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


@contextmanager
def answering_before(sock: socket.socket, stage: LoadStage) -> Iterator[None]:
    """Answer all requests with 503 and the stage inside the block, on a separate thread: no model can serve yet."""
    options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "ws": "none"}
    options |= {"interface": "asgi3", "lifespan": "off", "timeout_graceful_shutdown": LAST_ERRORS_S}
    config = uvicorn.Config(partial(_refuse, stage), **options)
    server, own = uvicorn.Server(config), sock.dup()  # the server closes it at its end
    thread = threading.Thread(target=server.run, args=([own],), name="before the models", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _refuse(stage: LoadStage, scope: Scope, receive: Receive, send: Send) -> None:
    path, told = scope["path"], f" ({stage})" if stage.name else ""
    error = ModelUnavailable(f"The server is still loading its models{told}.", retry_after_s=BUSY_S)
    response: Response = respond(envelope_of(path).error(error), scope)
    if path in OPEN_PATHS:
        facts = {"status": "loading", "error": error.message, "stage": stage.name or None, "progress": stage.share}
        response = JSONResponse(facts, 503)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def run(
    app: FastAPI,
    engine: "EngineClient",
    sock: socket.socket,
    *,
    drain_s: float,
    started: Callable[[], object] = do_nothing,
) -> None:
    """Serve the application until Ctrl-C, SIGTERM or SIGHUP; running replies then have `drain_s` to finish.

    A second Ctrl-C or SIGTERM ends them immediately. `started` is called once requests are accepted. Raises EngineDead
    if the engine ended by itself: the process cannot serve any more, and its supervisor can start another.
    """
    allow_open_files()
    usual_s = sys.getswitchinterval()
    engine.watch_preparing(lambda is_busy: sys.setswitchinterval(SWITCH_S if is_busy else usual_s))
    with GarbageCollector() as garbage:
        EngineServer(app, engine, drain_s=drain_s, started=started, tick=garbage.tick).run(sockets=[sock])
    if engine.is_dead:
        raise EngineDead(engine.error() or "The engine has stopped.")


class EngineServer(uvicorn.Server):
    """A uvicorn server that ends the engine's work before the connections, so that every stream gets its last event."""

    def __init__(
        self,
        app: FastAPI,
        engine: "EngineClient",
        *,
        drain_s: float,
        started: Callable[[], object],
        tick: Callable[[], object] = do_nothing,
    ) -> None:
        """Configure the server. `tick` is called ten times a second."""
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(GuardedProtocol, limits=app.state.config.connections)),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            headers=[("x-content-type-options", "nosniff"), ("cross-origin-resource-policy", "same-origin")],
            timeout_keep_alive=KEEP_CONNECTION_S,
            timeout_graceful_shutdown=LAST_EVENTS_S,
        )
        super().__init__(config)
        self._engine = engine
        self._requests: OpenRequests = app.state.open_requests
        self._drain_s = drain_s
        self._on_start = started
        self._tick = tick
        self._died_s: float | None = None
        self._stopped_by: signal.Signals | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without uvicorn's re-raise at the end, which would replace exit code 0 by the signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [number for number in STOP_SIGNALS if not (number == signal.SIGHUP and has_nohup)]
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopped_by is None:
            self._stopped_by = signal.Signals(sig)
        elif sig != signal.SIGHUP:  # a terminal that closes may send it twice
            self.force_exit = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Decide whether to stop. uvicorn calls this ten times a second."""
        should_exit = await super().on_tick(counter)
        self._tick()
        if self._engine.is_dead and self._died_s is None:
            self._died_s = time.monotonic()
        else:
            self._engine.error()  # lets the watchdog report even if no client asks for the state
        return should_exit or (self._died_s is not None and time.monotonic() - self._died_s >= LAST_ERRORS_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._stopped_by is not None:
            message = "%s: running replies get %g seconds to finish. Ctrl-C again ends them now."
            logger.info(message, self._stopped_by.name, self._drain_s)
        self._requests.refuse()
        drain = asyncio.create_task(self._engine.shutdown(self._drain_s))
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.1)
        if not drain.done():
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
            await self._engine.shutdown(0)
        self._requests.refuse()  # those that came meanwhile
        self.force_exit = False  # the engine has ended: only the last event of each stream remains
        await super().shutdown(sockets)


def freeze_garbage_collector() -> None:
    """Exclude all objects that exist now from later garbage collections."""
    gc.collect()
    gc.freeze()


class GarbageCollector:
    """Decides inside its block when Python collects cyclic garbage.

    A full collection visits every object while all threads wait. Python starts one when the number of objects grows,
    which is exactly while a long request body is decoded: its objects are visited again and again, and none is garbage.
    Therefore full collections run in quiet moments, when few objects are alive.
    """

    def __init__(
        self,
        *,
        num_objects: Callable[[], int] = sys.getallocatedblocks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_objects = num_objects
        self._clock = clock
        self._thresholds = gc.get_threshold()
        self._num_loaded = 0
        self._collected_s = 0.0

    def __enter__(self) -> Self:
        freeze_garbage_collector()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._num_loaded, self._collected_s = self._num_objects(), self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._thresholds)

    def tick(self) -> None:
        """Run a full collection if one is due and the moment is quiet, or if no moment was quiet for MAX_WAIT_S."""
        if gc.get_count()[2] < DUE:
            return
        is_quiet = self._num_objects() - self._num_loaded <= MAX_OBJECTS
        if is_quiet or self._clock() - self._collected_s >= MAX_WAIT_S:
            gc.collect()
            self._collected_s = self._clock()
