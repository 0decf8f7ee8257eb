"""Two keys whose bodies and PDFs wait for the same threads and processes: none waits for the other's backlog."""

import base64
import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import Running, eventually, serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.server import bodies

from ..media.pdf_samples import pdf, show, slow
from .fakes import FakeEngine

PARTS = 16_000


class Clients:
    """Send requests in order, each on a connection of its own, and note in which order they are answered."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._threads = ThreadPoolExecutor(16)
        self.answered: list[str] = []

    def send(self, key: str, content: bytes) -> None:
        sent = threading.Event()

        def pieces() -> Iterator[bytes]:
            yield content
            sent.set()

        def post() -> None:
            headers = {"x-api-key": key, "content-type": "application/json", "content-length": str(len(content))}
            with self._server.http(headers=headers) as http:
                http.post("/v1/chat/completions", content=pieces())
            self.answered.append(key)

        self._threads.submit(post)
        assert sent.wait(60)

    def finish(self) -> list[str]:
        self._threads.shutdown()
        return self.answered


def test_a_body_is_read_before_the_bodies_of_a_key_that_sent_many() -> None:
    """All arrive while the first is read."""
    slow, long, small = (saying([{"type": "text", "text": "a"}] * number) for number in (60_000, 12_000, 2_000))
    with serving(FakeEngine(), api_keys=("ann", "ben")) as server:
        clients = Clients(server)
        clients.send("ann", slow)
        for _ in range(7):
            clients.send("ann", long)
        clients.send("ben", small)
        assert sorted(clients.finish()) == ["ann"] * 8 + ["ben"]
        sizes = [len(request.messages[0].parts) for request in server.engine.requests]
    assert sizes.index(2_000) <= 6, sizes


@pytest.mark.parametrize("keys, rests", [(("ann", "ben"), True), (("ann",), False)])
def test_a_key_rests_after_a_long_body_where_others_share_the_server(
    keys: tuple[str, ...], rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the rest lasts longer than the test, however slow the machine is."""
    monkeypatch.setattr(bodies, "REST", 100_000)
    long, small = (saying([{"type": "text", "text": "a"}] * number) for number in (24_000, 4_000))
    with serving(FakeEngine(), api_keys=keys) as server:
        post(server, "ann", long)
        with socket.create_connection(("127.0.0.1", server.port)) as second:
            second.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: ann\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(small), small)
            )
            post(server, keys[-1], small)
            is_answered = bool(select.select([second], [], [], 0.0 if rests else 60.0)[0])
        assert is_answered != rests


@pytest.fixture
def reading(checkpoint: Callable[..., Path]) -> Iterator[Running]:
    engine = start_engine(EngineConfig(model=str(checkpoint("qwen3")), max_model_len=1024))
    with serving(engine, api_keys=("ann", "ben")) as running:
        yield running


def test_a_pdf_is_read_before_the_pdfs_of_a_key_that_sent_many(reading: Running) -> None:
    clients = Clients(reading)
    for number in range(4):
        clients.send("ann", asking(slow(3 + number)))
    with reading.http(headers={"x-api-key": "ben"}) as ben:
        eventually(lambda: len(ben.get("/v1/status").json()["requests"]) == 4)
    clients.send("ben", asking(pdf(show("Hello"))))
    assert clients.finish().index("ben") <= 2


def post(server: Running, key: str, content: bytes) -> None:
    with server.http(headers={"x-api-key": key, "content-type": "application/json"}) as http:
        assert http.post("/v1/chat/completions", content=content).status_code == 200


def asking(document: bytes) -> bytes:
    data = f"data:application/pdf;base64,{base64.b64encode(document).decode()}"
    return saying([{"type": "file", "file": {"filename": "a.pdf", "file_data": data}}])


def saying(content: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()
