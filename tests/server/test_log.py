"""One line a request, with figures and without a word of the conversation."""

import json
import logging
import re
from typing import Any

import httpx
import pytest

from tests.support.rows import row
from tests.support.running import Running, eventually, post_bytes
from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.events import Failed, PromptProgress, Started, TextDelta
from vllm_mlx.core.receipt import ChangeCause, PromptChange
from vllm_mlx.server import log

from .fakes import FakeEngine, Pause, finished
from .test_disconnects import post

SECRET = "xyzzy-secret"
CHAT: Any = {"messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture(autouse=True)
def logged(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine.play = lambda request, index: (Started(7, 2), TextDelta(SECRET), finished())


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    logged = [record.getMessage() for record in caplog.records if record.name == "vllm_mlx.requests"]
    return [dict(re.findall(r"(\S+?)=('[^']*'|\S+)", line)) for line in logged]


def only_line(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    eventually(lambda: bool(lines(caplog)))
    [line] = lines(caplog)
    return line


@row("S0-20")
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply(server: Running, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with server.http(headers={"x-request-id": "mine"}) as client:
        client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    line = only_line(caplog)
    assert {name: line[name] for name in ("id", "status", "model", "finish", "path")} == {
        "id": "mine",
        "status": "200",
        "model": "tiny",
        "finish": "stop",
        "path": "/v1/chat/completions",
    }
    assert [line[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion", "reasoning")] == ["7", "2", "3", "0"]
    assert 0 <= float(line["ttft_s"]) <= float(line["duration_s"])
    assert line["reply"].startswith("chatcmpl-") and float(line["tokens_per_s"]) > 0
    assert SECRET not in caplog.text


def test_what_altered_a_prompt(server: Running, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    server.engine.prompt_change = PromptChange(
        cause=ChangeCause.MESSAGE,
        num_common_tokens=5,
        num_previous_tokens=6,
        previous_token_id=70,
        token_id=71,
        message=2,
        role="user",
    )
    http.post("/v1/chat/completions", json=CHAT)
    assert only_line(caplog)["altered"] == "'message at token 5 of 6 (70 -> 71), message 2 (user)'"


@row("S0-20")
@pytest.mark.parametrize(("every_s", "expected"), [(0.0, ["10/40", "20/40", "30/40"]), (3600.0, [])])
def test_a_long_prompt_tells_how_far_it_is(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, every_s: float, expected: list
) -> None:
    monkeypatch.setattr(log, "PROGRESS_EVERY_S", every_s)
    steps = [step for done in (10, 20, 30) for step in (Pause(0.03), PromptProgress(done, 40))]
    server.engine.play = lambda request, index: (Started(40, 2), *steps, TextDelta("a"), finished())
    with server.http(headers={"x-request-id": "mine"}) as client:
        client.post("/v1/chat/completions", json=CHAT)
    eventually(lambda: any("finish" in line for line in lines(caplog)))
    *told, last = lines(caplog)
    assert [(line["id"], line["prefill"]) for line in told] == [("mine", progress) for progress in expected]
    assert 0 < float(last["prompt_tokens_per_s"]) < 5 / 0.06


def test_a_refused_request(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    http.post("/v1/chat/completions", json={**CHAT, "audio": SECRET})
    line = only_line(caplog)
    assert (line["status"], line["error"]) == ("400", "unsupported_parameter")
    assert SECRET not in caplog.text


def test_a_failed_stream(server: Running, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    server.engine.play = lambda request, index: (TextDelta("a"), Failed(GenerationError("Broke.")))
    http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert only_line(caplog)["error"] == "generation_failed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_went(server: Running, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    server.engine.play = lambda request, index: (Started(7, 2), TextDelta("a"), Pause())
    connection = post(server, stream=stream)
    eventually(lambda: bool(server.engine.running))
    connection.close()
    line = only_line(caplog)
    assert line["status"] == "499" and line["prompt_tokens"] == "7"


def test_a_client_that_went_inside_its_body(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with server.connect() as connection:
        connection.sendall(post_bytes("/v1/chat/completions", json.dumps(CHAT))[:-5])
    line = only_line(caplog)
    assert line["status"] == "499" and "error" not in line
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_a_probe_is_not_worth_a_line(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    http.get("/health")
    assert lines(caplog) == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_of_ours_is_logged_with_its_trace_and_told_without(
    server: Running, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def broken(request: object, index: int) -> Any:
        return (TextDelta("a"), TextDelta(5), finished())  # type: ignore[arg-type]

    server.engine.play = broken
    with server.http(headers={"x-request-id": "mine"}) as client:
        answer = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert "Traceback" not in answer.text and "TypeError" not in answer.text
    assert "server_error" in answer.text
    assert only_line(caplog)["error"] == "internal_error"
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.ERROR] == [True]
    if not stream:
        assert answer.status_code == 500 and "mine" in answer.json()["error"]["message"]


def test_a_hostile_path_stays_one_line(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    http.get("/a%0Aid=fake%20x")
    eventually(lambda: bool(lines(caplog)))
    [record] = [record for record in caplog.records if record.name == "vllm_mlx.requests"]
    assert "\n" not in record.getMessage()
