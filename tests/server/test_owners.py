"""Every generation has an owner from its submission on: whatever fails, and whoever leaves, nothing stays behind."""

import asyncio
import gc
import json
import weakref
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.running import Running, eventually, post_bytes, serving, slowly
from vllm_mlx.api.anthropic.encode import MessageStream
from vllm_mlx.api.openai.encode import ChatStream
from vllm_mlx.api.replies import ReplyFold
from vllm_mlx.api.responses.encode import ResponseStream
from vllm_mlx.core.request import Request
from vllm_mlx.engine.admission import AdmissionQueue
from vllm_mlx.server import routes
from vllm_mlx.server.log import Receipts, RequestRecord, error_of
from vllm_mlx.server.response_store import ResponseStore

from .fakes import FakeEngine, FakeGeneration

MAX_OPEN = 3  # requests that the server under test holds at once
MODEL, SETTINGS = "qwen3", {"max_model_len": 512, "max_num_seqs": 1, "max_queue": MAX_OPEN - 1}
HI: Any = [{"role": "user", "content": "Hello"}]
CHAT: Any = {"messages": HI, "max_tokens": 3}
COMPLETION: Any = {"prompt": ["a", "b"], "max_tokens": 3}
RESPONSE: Any = {"input": "Hello", "max_output_tokens": 3}
REQUESTS: Any = {
    "chat": ("/v1/chat/completions", CHAT),
    "streamed chat": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "completion": ("/v1/completions", COMPLETION),
    "streamed completion": ("/v1/completions", {**COMPLETION, "stream": True}),
    "message": ("/v1/messages", CHAT),
    "streamed message": ("/v1/messages", {**CHAT, "stream": True}),
    "response": ("/v1/responses", RESPONSE),
    "streamed response": ("/v1/responses", {**RESPONSE, "stream": True}),
    "background response": ("/v1/responses", {**RESPONSE, "background": True}),
}
SEAMS: Any = {
    "the line": (AdmissionQueue, "watch", list(REQUESTS)),
    "the record": (RequestRecord, "begin_reply", list(REQUESTS)),
    "an observed event": (RequestRecord, "observe", list(REQUESTS)),
    "headers": (Receipts, "headers", ["chat", "streamed chat", "streamed message", "streamed response"]),
    "the writer": (routes._EventWriter, "begin", ["streamed chat", "streamed completion"]),
    "an encoder": (ChatStream, "__init__", ["streamed chat"]),
    "an encoder of messages": (MessageStream, "__init__", ["streamed message"]),
    "the head": (ChatStream, "open", ["streamed chat"]),
    "the end": (ChatStream, "close", ["streamed chat"]),
    "a fold": (ReplyFold, "feed", ["chat"]),
    "a response": (ResponseStream, "feed", ["response", "streamed response", "background response"]),
    "the whole reply": (ReplyFold, "finish", ["chat"]),
    "the response's store": (
        ResponseStore,
        "put",
        ["response", "streamed response", "background response"],
    ),
}


@pytest.mark.parametrize("name", SEAMS)
def test_a_fault_behind_the_submission_leaves_nothing(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("injected fault")

    owner, method, kinds = SEAMS[name]
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, broken)
        for kind in kinds:
            path, body = REQUESTS[kind]
            for _ in range(MAX_OPEN):
                answer = http.post(path, json=body)
                assert answer.status_code != 429
    eventually(lambda: http.get("/v1/status").json()["requests"] == [])
    assert not server.engine.queue.num_preparing and not server.engine.queue.timers
    for kind in kinds:
        path, body = REQUESTS[kind]
        assert http.post(path, json=body).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages?beta=true", "/v1/responses"])
def test_a_full_queue_refuses_before_the_body_comes(server: Running, path: str) -> None:
    body = json.dumps({"prompt": "One", "max_tokens": 400, "ignore_eos": True, "stream": True})
    eventually(lambda: not server.engine.generations)  # the test before may have left one
    with slowly(server), ExitStack() as stack, server.http() as client:
        for _ in range(MAX_OPEN):
            stack.enter_context(holder := server.connect())
            holder.sendall(post_bytes("/v1/completions", body))
        eventually(lambda: len(client.get("/v1/status").json()["requests"]) == MAX_OPEN)
        late = stack.enter_context(server.connect())
        late.sendall(post_bytes(path, " " * 1000)[:-1000])
        assert late.recv(1000).startswith(b"HTTP/1.1 429")
    eventually(lambda: not server.engine.generations)


def test_a_background_response_that_cannot_be_stored_never_runs(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("injected fault")

    async def submitted(request: Request) -> None:
        raise AssertionError("it was submitted")

    monkeypatch.setattr(ResponseStore, "put", broken)
    monkeypatch.setattr(server.engine, "submit", submitted)
    answer = http.post("/v1/responses", json={**RESPONSE, "background": True})
    assert answer.status_code == 500 and answer.json()["error"]["message"]


def test_a_background_response_that_is_refused_is_not_stored(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[str] = []
    put = ResponseStore.put

    def noting(self: ResponseStore, response: Any) -> None:
        if "word word" in str(response.input):  # a response of an earlier test may end late
            stored.append(response.response_id)
        put(self, response)

    monkeypatch.setattr(ResponseStore, "put", noting)
    answer = http.post("/v1/responses", json={**RESPONSE, "input": "word " * 1000, "background": True})
    assert answer.status_code == 400 and "context length" in answer.json()["error"]["message"]
    assert http.get(f"/v1/responses/{stored[0]}").status_code == 404


class Preparing(FakeEngine):
    """Prepares each request for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.num_preparing = 0

    async def submit(self, request: Request) -> FakeGeneration:
        self.num_preparing += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_preparing -= 1
        raise AssertionError("it waits for ever")

    async def count_tokens(self, request: Request) -> int:
        await self.submit(request)
        return 0


@pytest.mark.parametrize("kind", [*REQUESTS, "count"])
def test_a_client_that_leaves_while_its_request_is_prepared_ends_it(kind: str) -> None:
    path, body = REQUESTS.get(kind, ("/v1/messages/count_tokens", {"messages": HI}))
    with serving(Preparing()) as running:
        connection = running.connect()
        connection.sendall(post_bytes(path, json.dumps({"model": "tiny", **body})))
        eventually(lambda: running.engine.num_preparing == 1)
        connection.close()
        eventually(lambda: running.engine.num_preparing == 0)
        eventually(lambda: not running.server.server_state.tasks)


def test_a_contained_error_leaves_nothing_in_memory() -> None:
    """Full garbage collections are rare, so frames and errors must not keep each other."""
    held: list[weakref.ref[set[int]]] = []
    reported: list[str] = []

    async def work() -> None:
        something = {1}
        held.append(weakref.ref(something))
        raise ValueError("broken")

    async def contain() -> None:
        reported.append(str(await error_of(work())))

    gc.disable()
    try:
        asyncio.run(contain())
        assert (reported, held[0]()) == (["broken"], None)
    finally:
        gc.enable()
