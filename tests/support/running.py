"""A server on a free port, in a thread of its own."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import ModelConfig
from vllm_mlx.core.errors import EngineDead
from vllm_mlx.disk.kept import NO_MEMORIES
from vllm_mlx.engine.found_models import FoundModels
from vllm_mlx.server.app import create_app
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.recorder import open_recorder
from vllm_mlx.server.run import EngineServer, listen
from vllm_mlx.util.tenants import unnamed_keys

NAMES = ("tiny", "alias")  # of a model that has no others


@dataclass
class Running:
    engine: Any
    server: EngineServer
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False, verify=False, **options)  # no TLS

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextlib.contextmanager
def serving(engine: Any, *, drain_s: float = 0, found: FoundModels | None = None, **settings: Any) -> Iterator[Running]:
    """Keys may be given as strings: `key1`, `key2` and so on are their names. `models` are those of the engine."""
    given = settings.get("api_keys", ())
    if all(isinstance(key, str) for key in given):
        settings["api_keys"] = unnamed_keys(given)
    models = settings.pop("models", None) or named(*settings.pop("served_model_names", NAMES))
    config = ServerConfig(models=models, **settings)
    sock = listen("127.0.0.1", 0)
    started = threading.Event()
    memories = getattr(engine, "memories", NO_MEMORIES)  # an engine of tests may have none
    app = create_app(engine, config, memories.responses, open_recorder(config), found)
    server = EngineServer(app, engine, drain_s=drain_s, started=started.set)
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    assert started.wait(120)
    try:
        yield Running(engine, server, sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive()


def named(*names: str) -> Catalogue:
    """A list of one model with these names."""
    return Catalogue((Entry(config=ModelConfig(model="tiny"), name=names[0], aliases=names[1:]),))


def start_python(code: str) -> subprocess.Popen[str]:
    """`code` in a process of its own, from the project's root. Its output is piped."""
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def post_bytes(path: str, body: str) -> bytes:
    """A request for a bare socket."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


@contextlib.contextmanager
def slowly(server: Running, step_s: float = 0.05) -> Iterator[None]:
    """Within the block, each step of a real engine takes so much longer: a long reply lasts as long as tests wait."""

    def slow(engine: Any) -> None:
        step = engine.step

        def later(*arguments: Any) -> None:
            time.sleep(step_s)
            step(*arguments)

        engine.step = later

    def usual(engine: Any) -> None:
        del engine.step

    asyncio.run(server.engine.ask(slow))
    try:
        yield
    finally:
        with contextlib.suppress(EngineDead):
            asyncio.run(server.engine.ask(usual))


def eventually(holds: Callable[[], bool], timeout_s: float = 120) -> None:
    """Fails if `holds` does not come true: for what another thread does soon, no measure of how soon."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
