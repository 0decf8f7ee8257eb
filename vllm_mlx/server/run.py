"""Serves an application on a socket until Ctrl-C or SIGTERM. Knows nothing of what is served."""

import asyncio
import errno
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from ..core.errors import ConfigError
from .ports import Engine

KEEP_CONNECTION_S = 75  # agents pause between requests; a connection closed under a request is an error to them
LAST_EVENTS_S = 5  # for streams to send their last event once the engine has stopped


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
        case socket.gaierror():
            return f"--host {host} is not an address of this machine. Use 127.0.0.1, or 0.0.0.0 for the network."
        case OSError(errno=errno.EADDRINUSE):
            return f"Port {port} on {host} is taken. Choose another with --port, or stop the program that holds it."
        case OSError(errno=errno.EACCES):
            return f"Port {port} needs administrator rights. Choose one above 1023 with --port."
        case OSError(errno=errno.EADDRNOTAVAIL):
            return f"--host {host} is not an address of this machine. Use 127.0.0.1, or 0.0.0.0 for the network."
        case _:
            return f"Cannot listen on {host}, port {port}: {error.strerror}."


def run(
    app: ASGIApp, engine: Engine, sock: socket.socket, *, drain_s: float, started: Callable[[], None] | None = None
) -> None:
    """Returns after Ctrl-C: running replies have had `drain_s` to finish, a second Ctrl-C ends them at once.

    `started` is called when the first request can come.
    """
    server = EngineServer(app, engine, drain_s=drain_s, started=started)
    try:
        server.run(sockets=[sock])
    except KeyboardInterrupt:
        return  # uvicorn raises the signal again once it has handled it


class EngineServer(uvicorn.Server):
    """Ends the engine's work before the connections: so every stream gets its last event, and nothing is cancelled."""

    def __init__(
        self, app: ASGIApp, engine: Engine, *, drain_s: float, started: Callable[[], None] | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_CONNECTION_S,
            timeout_graceful_shutdown=LAST_EVENTS_S,
        )
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s
        self._on_start = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_start is not None:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self._engine.shutdown(self._drain_s))
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.1)
        if not drain.done():
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
            await self._engine.shutdown(0)
        self.force_exit = False  # the engine is done: what remains is the last event of each stream
        await super().shutdown(sockets)
