"""`--record-requests`: one file a request, bounded, for its owner alone, and enough to send it again."""

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from scripts._replay.trace import load
from tests.support.running import Running, eventually, serving
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.server.recorder import RequestRecorder

from .fakes import FakeEngine

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SECRET = "Zanzibar"
ASKED: Any = {
    "messages": [{"role": "system", "content": f"Be {SECRET}."}, {"role": "user", "content": SECRET}],
    "tools": [{"type": "function", "function": {"name": SECRET, "parameters": {"type": "object"}}}],
    "temperature": 0.5,
}


def records(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def recording(folder: Path, **settings: Any) -> Any:
    return serving(FakeEngine(), record_requests=str(folder), **settings)


def post(server: Running, path: str, body: Any, **headers: str) -> Any:
    with server.http(headers={"user-agent": "cursor/9", **headers}) as client:
        return client.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))


def test_a_record_of_each_request_without_its_texts(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "records"
    with recording(folder, api_keys=(SECRET,)) as server:
        keyed = {"authorization": f"Bearer {SECRET}", "cookie": SECRET}
        for body in (ASKED, ASKED | {"stream": True}, ASKED | {"mind": SECRET}, ASKED | {"model": SECRET}):
            post(server, CHAT, body, **keyed)
        post(server, MESSAGES, {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "mind": 1}, **keyed)
        post(server, CHAT, b'{"messages": "' + SECRET.encode(), **{**keyed, "content-type": "application/json"})
        with server.http(headers=keyed) as client:
            client.get("/v1/models")  # nothing to record
    found = records(folder)
    assert SECRET not in "".join(path.read_text() for path in folder.iterdir())
    assert [(each["endpoint"], each["response"]["status"], each["fault"]) for each in found] == [
        (CHAT, 200, None),
        (CHAT, 200, None),
        (CHAT, 400, 400),
        (CHAT, 404, 404),
        (MESSAGES, 200, None),
        (CHAT, 400, 400),
    ]
    whole, streamed, unknown, model, tolerated, broken = found
    assert whole["response"]["prompt_tokens"] == 7 and whole["response"]["finish"] == "stop"
    assert whole["headers"]["user-agent"] == "cursor/9" and "authorization" not in whole["headers"]
    assert whole["shape"]["temperature"] == 0.5 and streamed["shape"]["stream"] is True
    assert "`mind`" not in unknown["response"]["message"] and unknown["response"]["error"] == "unknown_parameter"
    assert list(unknown["shape"])[-1] == "mind" and model["response"]["error"] == "model_not_found"
    assert tolerated["response"]["unknown_fields"] == ["mind"] and broken["shape"] == {"~invalid": 22}
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_record_is_played_again(tmp_path: Path) -> None:
    """The same request, with other words: what reaches the engine has the same structure."""
    with recording(tmp_path) as server:
        post(server, CHAT, ASKED)
        post(server, CHAT, ASKED | {"messages": [*ASKED["messages"], {"role": "assistant", "content": "Yes."}]})
        eventually(lambda: len(records(tmp_path)) == 2)
        first, second = load(tmp_path)
        assert first.endpoint == CHAT and first.protocol is not None and first.body is not None
        assert second.body is not None and second.body["messages"][:2] == first.body["messages"]
        assert post(server, CHAT, first.body).status_code == 200
        asked, again = server.engine.requests[0], server.engine.requests[-1]
    assert [message.role for message in asked.messages] == [message.role for message in again.messages]
    assert [len(message.parts[0].text) for message in asked.messages] == [
        len(message.parts[0].text) for message in again.messages
    ]
    assert (len(asked.tools), asked.sampling) == (len(again.tools), again.sampling)


@pytest.mark.parametrize("body", [{"input": [{"role": "user", "content": SECRET}]}, {"messages": 5}, b"{"])
def test_a_record_of_another_form_is_played_as_it_is(tmp_path: Path, body: Any) -> None:
    with recording(tmp_path) as server:
        post(server, CHAT, body, **{"content-type": "application/json"})
    [found] = load(tmp_path)
    assert found.protocol is None and found.endpoint == CHAT


def offered(recorder: RequestRecorder, body: bytes) -> None:
    recorder.offer({"method": "POST", "endpoint": CHAT, "fault": None, "response": {"status": 200}}, {}, body)


def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    for start in (0, 10):  # a second process counts what the first left
        recorder = RequestRecorder(tmp_path, max_files=5)
        for number in range(start, start + 10):
            offered(recorder, json.dumps({"n": number}).encode())
        recorder.close()
    assert [each["shape"]["n"] for each in records(tmp_path) if each] == [15, 16, 17, 18, 19]
    assert (tmp_path / "mine.json").exists()


def test_bytes_are_bounded(tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path, max_bytes=20_000)
    for _ in range(20):
        offered(recorder, json.dumps({"messages": [{"role": "user", "content": "x"}] * 40}).encode())
    recorder.close()
    assert 0 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000


def test_long_bodies_are_recorded_by_their_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RequestRecorder(tmp_path)
    offered(recorder, b"[" + b" " * 33 * 1024 * 1024 + b"]")
    many = json.dumps([["x"] * 130_000]).encode()
    offered(recorder, many)
    eventually(lambda: len(records(tmp_path)) == 2)
    recorder.close()
    first, second = records(tmp_path)
    assert first["shape"] == {"~long": 33 * 1024 * 1024 + 2} and second["shape"] == {"~long": len(many)}


def test_what_waits_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    recorder = RequestRecorder(tmp_path, max_waiting=2)
    for _ in range(50):
        offered(recorder, json.dumps([["x"] * 10_000]).encode())
    recorder.close()
    assert 0 < len(records(tmp_path)) < 50 and "not recorded" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--record-requests"):
        RequestRecorder(tmp_path / "file" / "records")


def test_a_folder_that_is_gone_harms_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "records"
    with recording(folder) as server:
        folder.rmdir()
        assert post(server, CHAT, ASKED).status_code == 200
    assert "was not recorded" in caplog.text
