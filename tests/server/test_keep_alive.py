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


class Reader:
    """Reads replies as they come. The reply of an engine may wait until it has read so many events without text."""

    def __init__(self) -> None:
        self._num_empty = 0

    def has_read(self, num_empty: int) -> Pause:
        return Pause(until=lambda: self._num_empty >= num_empty)

    def read(self, client: httpx.Client, path: str, body: Any) -> list[Any]:
        """The choices of all events."""
        self._num_empty = 0
        choices = []
        with client.stream("POST", path, json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    choices.append(choice)
                    self._num_empty += choice.get("delta") == {} or choice.get("text") == ""
        assert line == "" or line == "data: [DONE]"
        return choices


def test_a_long_prefill_sends_empty_deltas_after_the_role() -> None:
    reader = Reader()
    engine = FakeEngine(
        play=lambda request, index: (
            reader.has_read(2),
            Started(7, 0),
            PromptProgress(3, 7),
            reader.has_read(4),
            TextDelta("a"),
            reader.has_read(6),
            finished(),
        )
    )
    with serving(engine, keep_alive_s=0.05) as server, server.http() as client:
        first, *rest = [choice["delta"] for choice in reader.read(client, "/v1/chat/completions", CHAT)]
    assert first == {"role": "assistant", "content": ""}
    at = rest.index({"content": "a"})
    assert {} in rest[:at] and rest[at + 1 : -1].count({}) > 0
    assert all(delta == {} for delta in rest[:at] + rest[at + 1 :])


def test_completions_and_hidden_reasoning_are_kept_alive_too() -> None:
    reader = Reader()
    rest = (reader.has_read(2), TextDelta("a"), finished())
    engine = FakeEngine(play=lambda request, index: (ReasoningDelta("h"), *rest))
    with serving(engine, keep_alive_s=0.05) as server, server.http() as client:
        chat = reader.read(client, "/v1/chat/completions", {**CHAT, "include_reasoning": False})
        hidden = [choice["delta"] for choice in chat]
        texts = [choice["text"] for choice in reader.read(client, "/v1/completions", {"prompt": "a", "stream": True})]
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
