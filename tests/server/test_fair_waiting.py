"""Two keys whose bodies and PDFs wait for the same threads and processes: none waits for the other's backlog."""

import asyncio
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
from vllm_mlx.media import processes
from vllm_mlx.server import bodies

from ..media.pdf_samples import pdf, show
from .fakes import FakeEngine
from .watched import engine_served


def test_a_body_is_read_before_the_bodies_of_a_key_that_sent_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is read until another key's request has come."""
    long, small = (saying([{"type": "text", "text": "a"}] * number) for number in (4_000, 3_000))
    first, read_json = threading.Lock(), bodies.read_json
    with serving(FakeEngine(), api_keys=("ann", "ben")) as server, ThreadPoolExecutor(4) as ann:

        def reading_long(body: bytes) -> Any:
            if first.acquire(blocking=False):
                eventually(lambda: bool(server.engine.requests))
            return read_json(body)

        monkeypatch.setattr(bodies, "read_json", reading_long)
        monkeypatch.setattr(bodies, "REST", 0)
        sent = [ann.submit(post, server, "ann", long) for _ in range(4)]
        eventually(first.locked)
        post(server, "ben", small)
        assert [reply.result() for reply in sent] == [None] * 4
        sizes = [len(request.messages[0].parts) for request in server.engine.requests]
    assert sizes == [3_000, *[4_000] * 4]


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
    with engine_served(checkpoint("qwen3"), max_model_len=1024, options={"api_keys": ("ann", "ben")}) as running:
        yield running


def test_a_pdf_is_read_before_the_pdfs_of_a_key_that_sent_many(
    reading: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of the first key is read to its end before that of the other key."""
    started: list[int] = []
    released, frames = threading.Event(), processes._frames

    async def held(process: Any, max_bytes: int) -> Any:
        started.append(process.pid)
        if len(started) <= 2:
            await asyncio.to_thread(released.wait)
        return await frames(process, max_bytes)

    monkeypatch.setattr(processes, "_frames", held)
    with ThreadPoolExecutor(4) as ann:
        sent = [ann.submit(post, reading, "ann", asking(pdf(show(f"Hello {number}")))) for number in range(4)]
        try:
            eventually(lambda: len(started) == 2)
            post(reading, "ben", asking(pdf(show("Hello"))))
            assert len(started) == 3 and not any(reply.done() for reply in sent)
        finally:
            released.set()


def post(server: Running, key: str, content: bytes) -> None:
    with server.http(headers={"x-api-key": key, "content-type": "application/json"}) as http:
        assert http.post("/v1/chat/completions", content=content).status_code == 200


def asking(document: bytes) -> bytes:
    data = f"data:application/pdf;base64,{base64.b64encode(document).decode()}"
    return saying([{"type": "file", "file": {"filename": "a.pdf", "file_data": data}}])


def saying(content: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()
