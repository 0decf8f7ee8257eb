"""One connection: requests sent ahead of a reply, heads in pieces, clients that leave. In memory and on sockets."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tests.support.rows import cases
from tests.support.running import Running, eventually, post_bytes
from vllm_mlx.core.events import TextDelta
from vllm_mlx.server.connection import MAX_HEADERS, ConnectionLimits, GuardedProtocol, refuse_connection
from vllm_mlx.server.guards import GuardMiddleware

from .fakes import FakeEngine, Pause, endless, hello

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}
MAX_HEAD = 300


class Wire(asyncio.Transport):
    """A transport in memory: it holds what is fed while reading is paused, as a socket does."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol | None = None
        self.written = bytearray()
        self._held: list[bytes] = []
        self._is_paused = self._is_closed = False

    def feed(self, data: bytes) -> None:
        self._held.append(data)
        while self._held and not self._is_paused and not self._is_closed:
            assert self.protocol is not None
            self.protocol.data_received(self._held.pop(0))

    def write(self, data: Any) -> None:
        assert not self._is_closed
        self.written += data

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        asyncio.get_running_loop().call_soon(self.feed, b"")

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if not self._is_closed and self.protocol is not None:
            self._is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


async def tell(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what it was asked for."""
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"<{scope['path']} {len(body)}>")(scope, receive, send)


def answers(*reads: bytes) -> bytes:
    """What a server writes for these reads."""
    return asyncio.run(_answers(reads))


async def _answers(reads: Sequence[bytes]) -> bytes:
    limits = ConnectionLimits(max_header_bytes=MAX_HEAD)
    config = uvicorn.Config(
        GuardMiddleware(tell, partial(refuse_connection, limits)),
        http=partial(GuardedProtocol, limits=limits),
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    config.load()
    wire = Wire()
    wire.protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
    wire.protocol.connection_made(wire)
    for read in reads:
        wire.feed(read)
        await asyncio.sleep(0)
    for _ in range(60):
        await asyncio.sleep(0)
    wire.close()
    await asyncio.sleep(0)
    return bytes(wire.written)


def bodies(raw: bytes) -> list[str]:
    return [each.partition(b">")[0].decode() for each in raw.split(b"<")[1:]]


def request(path: str, num_bytes: int, body: bytes = b"", *lines: str) -> bytes:
    """With a head of exactly so many bytes."""
    method = "POST" if body or lines else "GET"
    head = "\r\n".join([f"{method} /{path} HTTP/1.1", "Host: localhost", *lines, "X: "])
    return (head + "y" * (num_bytes - len(head) - 4) + "\r\n\r\n").encode() + body


CHUNKED = b"5\r\nhello\r\n4\r\n\r\n\r\n\r\n0\r\nX-Trailer: a\r\n\r\n"
ALLOWED = [
    request("a", MAX_HEAD),
    request("b", MAX_HEAD, b"\r\n\r\nGET /", "Content-Length: 9"),
    request("c", MAX_HEAD, CHUNKED, "Transfer-Encoding: chunked"),
    request("d", 100),
]
LONG = request("e", MAX_HEAD + 1)


def every_cut(stream: bytes) -> Iterator[tuple[bytes, ...]]:
    for at in range(1, len(stream)):
        yield stream[:at], stream[at:]
    for size in (1, 2, 3, 7, 64, 299, 300, 301):
        yield tuple(stream[at : at + size] for at in range(0, len(stream), size))


def test_allowed_heads_are_answered_whatever_the_cut_of_reads() -> None:
    for sent, answer in zip(ALLOWED, ["/a 0", "/b 9", "/c 9", "/d 0"], strict=True):
        for reads in every_cut(sent):
            assert bodies(answers(*reads)) == [answer], [len(read) for read in reads]


def test_a_long_head_is_refused_whatever_the_cut_of_reads() -> None:
    for reads in every_cut(LONG + ALLOWED[3]):
        raw = answers(*reads)
        assert raw.startswith(b"HTTP/1.1 431 ") and bodies(raw) == [], [len(read) for read in reads]


def test_a_long_head_behind_a_request_is_not_answered_with_it() -> None:
    for reads in every_cut(ALLOWED[1] + LONG + ALLOWED[3]):
        assert bodies(answers(*reads)) == ["/b 9"], [len(read) for read in reads]


@pytest.mark.parametrize("num_headers", [MAX_HEADERS, MAX_HEADERS + 1])
def test_the_number_of_headers_is_bounded(num_headers: int) -> None:
    stream = b"GET / HTTP/1.1\r\n" + b":\r\n".join([b"a"] * num_headers) + b":\r\n\r\n"
    raw = answers(stream)
    assert (b"431" in raw and b"256 headers" in raw) is (num_headers > MAX_HEADERS)


def test_trailers_are_bounded_as_headers_are() -> None:
    head = request("c", 100, b"1\r\na\r\n0\r\nX: ", "Transfer-Encoding: chunked")
    raw = answers(head, *[b"y" * 100] * 4)
    assert b"HTTP/1.1 431" in raw and bodies(raw) == []


POST = post_bytes("/v1/chat/completions", json.dumps(CHAT))
STREAMED = post_bytes("/v1/chat/completions", json.dumps({**CHAT, "stream": True}))
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("ahead", [GET, GET * 50, POST, STREAMED, POST[:-1]])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_connection_closes_after_a_reply_during_which_another_request_came(
    server: Running, engine: FakeEngine, ahead: bytes, at_once: bool
) -> None:
    sent = threading.Event()
    rest = Pause(until=sent.is_set)
    engine.play = lambda request, index: (TextDelta("a"), rest, *hello(request, index))
    with server.connect() as connection:
        connection.sendall(POST + (ahead if at_once else b""))
        if not at_once:
            eventually(lambda: bool(engine.running))
            connection.sendall(ahead)
        sent.set()
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    assert raw.count(b"HTTP/1.1 ") == raw.count(b"HTTP/1.1 200 OK") == 1 and b'"finish_reason":"stop"' in raw
    assert len(engine.requests) == 1


def test_garbage_behind_a_request_does_not_spoil_its_reply(server: Running, engine: FakeEngine) -> None:
    engine.play = lambda request, index: (TextDelta("a"), Pause(0.05), *hello(request, index))
    with server.connect() as connection:
        connection.sendall(STREAMED + b"\0garbage\r\n\r\n")
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    assert raw.count(b"HTTP/1.1 ") == 1 and raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


AHEAD = [GET, GET * 3, POST, POST + b"GET / HTTP", post_bytes("/v1/x", "x" * 100_000)[:-1]]


@pytest.mark.parametrize("first", [POST, STREAMED], ids=["folded", "streamed"])
@pytest.mark.parametrize("ahead", cases(AHEAD, [GET, POST + b"GET / HTTP"]))
@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_sent_requests_ahead_and_leaves_frees_what_it_held(
    server: Running, engine: FakeEngine, caplog: pytest.LogCaptureFixture, first: bytes, ahead: bytes, at_once: bool
) -> None:
    engine.play = endless
    with caplog.at_level(logging.WARNING):
        connection = server.connect()
        connection.sendall(first + (ahead if at_once else b""))
        eventually(lambda: bool(engine.running))
        if not at_once:
            connection.sendall(ahead)
        connection.close()
        eventually(lambda: not engine.running and not server.server.server_state.connections)
    eventually(lambda: not server.server.server_state.tasks)
    assert len(engine.aborted) == 1 and not engine.finished
    assert [record.getMessage() for record in caplog.records] == []
