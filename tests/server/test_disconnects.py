"""A client that goes away frees what it held; one that stays until the end aborts nothing."""

import asyncio
import contextlib
import json
import logging
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.rows import row
from tests.support.running import Running, eventually, post_bytes
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.events import GenerationEvent, TextDelta
from vllm_mlx.server.generations import PromptBatch

from .fakes import endless, finished, hello, silent

pytestmark = pytest.mark.usefixtures("engine")


def post(server: Running, **fields: object) -> socket.socket:
    """A connection with a chat request on it, sent and not read."""
    connection = server.connect()
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})
    connection.sendall(post_bytes("/v1/chat/completions", body))
    return connection


@row("S4-9")
@pytest.mark.parametrize("play", [endless, silent])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_aborts(server: Running, play: object, stream: bool, n: int) -> None:
    server.engine.play = play  # type: ignore[assignment]
    connection = post(server, stream=stream, n=n)
    eventually(lambda: bool(server.engine.running))
    connection.close()
    eventually(lambda: not server.engine.running)
    assert len(server.engine.aborted) == 1 and not server.engine.finished


def test_a_client_that_goes_aborts_every_prompt(server: Running) -> None:
    server.engine.play = silent
    connection = server.connect()
    connection.sendall(post_bytes("/v1/completions", json.dumps({"prompt": ["a", "b", "c"]})))
    eventually(lambda: len(server.engine.running) == 3)
    connection.close()
    eventually(lambda: not server.engine.running)
    assert len(server.engine.aborted) == 3


@row("S4-35")
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_read_to_its_end_aborts_nothing(server: Running, http: httpx.Client, stream: bool) -> None:
    for _ in range(20):
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.aborted == [] and len(server.engine.finished) == 20


def test_one_prompt_refused_leaves_no_other_running(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.play = silent
    submit = server.engine.submit

    async def refuse_the_third(request: object) -> object:
        if len(server.engine.requests) == 2:
            raise InvalidParameter("No.", param="prompt")
        return await submit(request)  # type: ignore[arg-type]

    monkeypatch.setattr(server.engine, "submit", refuse_the_third)
    assert http.post("/v1/completions", json={"prompt": ["a", "b", "c"]}).status_code == 400
    assert len(server.engine.aborted) == 2 and not server.engine.running


def test_forty_that_vanish_leave_nothing(server: Running, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    dice = random.Random(4)
    server.engine.play = endless
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            connections = [post(server, stream=dice.random() < 0.7) for _ in range(20)]
            for connection in connections:
                if dice.random() < 0.5:
                    connection.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        connection.recv(dice.randint(1, 2000))
                if dice.random() < 0.3:  # a reset instead of a polite end
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.close()
    eventually(lambda: not server.engine.running and not server.server.server_state.tasks)
    assert len(server.engine.requests) == len(server.engine.aborted) + len(server.engine.finished)
    assert not server.server.server_state.connections
    server.engine.play = hello
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "Hello"
    assert [record.getMessage() for record in caplog.records] == []


def test_a_reader_that_stalls_and_goes_is_noticed(server: Running) -> None:
    server.engine.play = lambda request, index: (*(TextDelta("x" * 60_000) for _ in range(2000)), finished())
    connection = post(server, stream=True)
    eventually(lambda: bool(server.engine.running))
    connection.recv(10)
    connection.close()
    eventually(lambda: not server.engine.running)
    assert len(server.engine.aborted) == 1


class Talk:
    """A generation of many events."""

    num_prompt_tokens = 7

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        for event in (*[TextDelta("a")] * 200, finished()):
            yield 0, event


def test_a_client_that_leaves_several_prompts_early_leaves_no_reader_behind() -> None:
    async def leave(talks: list[Any]) -> None:
        async with PromptBatch(talks, 1) as batch:
            async for _ in batch:
                for _ in range(200):  # until the queue is full
                    await asyncio.sleep(0)
                return

    asyncio.run(asyncio.wait_for(leave([Talk(), Talk()]), 20))
