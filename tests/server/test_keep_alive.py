"""Silence on a stream is broken by events that clients count."""

import json
from typing import Any

import httpx

from tests.support.running import serving
from vllm_mlx.core.events import PromptProgress, ReasoningDelta, Started, TextDelta

from .fakes import FakeEngine, Pause, finished

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def events(response: httpx.Response) -> list[Any]:
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def deltas(response: httpx.Response) -> list[dict[str, str]]:
    return [event["choices"][0]["delta"] for event in events(response)]


def test_a_long_prefill_sends_empty_deltas_after_the_role() -> None:
    engine = FakeEngine(
        play=lambda request, index: (
            Pause(0.3),
            Started(7, 0),
            PromptProgress(3, 7),
            Pause(0.3),
            TextDelta("a"),
            Pause(0.3),
            finished(),
        )
    )
    with serving(engine, keep_alive_s=0.05) as server, server.http() as client:
        first, *rest = deltas(client.post("/v1/chat/completions", json=CHAT))
    assert first == {"role": "assistant", "content": ""}
    at = rest.index({"content": "a"})
    assert {} in rest[:at] and rest[at + 1 : -1].count({}) > 0
    assert all(delta == {} for delta in rest[:at] + rest[at + 1 :])


def test_completions_and_hidden_reasoning_are_kept_alive_too() -> None:
    engine = FakeEngine(play=lambda request, index: (ReasoningDelta("h"), Pause(0.3), TextDelta("a"), finished()))
    with serving(engine, keep_alive_s=0.05) as server, server.http() as client:
        hidden = deltas(client.post("/v1/chat/completions", json={**CHAT, "include_reasoning": False}))
        texts = [
            event["choices"][0]["text"]
            for event in events(client.post("/v1/completions", json={"prompt": "a", "stream": True}))
        ]
    assert hidden.count({}) > 1 and {"content": "a"} in hidden
    assert texts.count("") > 1 and "".join(texts) == "ha"


def test_a_busy_stream_gets_none() -> None:
    engine = FakeEngine(play=lambda request, index: (*(TextDelta("a") for _ in range(200)), finished()))
    with serving(engine, keep_alive_s=3600) as server, server.http() as client:
        assert deltas(client.post("/v1/chat/completions", json=CHAT)).count({}) == 1  # the last one


def test_health_answers_while_a_reply_runs() -> None:
    engine = FakeEngine(play=lambda request, index: (Pause(),))
    with (
        serving(engine) as server,
        server.http() as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT) as response,
    ):
        assert response.status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
