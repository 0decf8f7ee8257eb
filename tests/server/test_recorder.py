"""`--record-requests`: a line for each request, bounded, for its owner alone, and enough to send it again."""

import json
import logging
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scripts._replay.trace import load
from tests.support.running import Running, eventually, serving
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.server import recorder as recording_module
from vllm_mlx.server.recorder import MAX_BODY_BYTES, RequestRecorder, redacted

from .fakes import FakeEngine

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SECRET = "Zanzibar-4711"
LOWER = SECRET.lower()  # as a word of a protocol might be written
SALT = b"salt"
ASKED: Any = {
    "messages": [{"role": "system", "content": f"Be {SECRET}."}, {"role": "user", "content": SECRET}],
    "tools": [{"type": "function", "function": {"name": SECRET, "parameters": {"type": "object"}}}],
    "temperature": 0.5,
}


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recording(path: Path, **settings: Any) -> Any:
    return serving(FakeEngine(), record_requests=str(path), **settings)


def post(server: Running, path: str, body: Any, **headers: str) -> Any:
    with server.http(headers={"user-agent": "cursor/9", **headers}) as client:
        return client.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))


def test_a_record_of_each_request_without_its_texts(tmp_path: Path) -> None:
    file = tmp_path / "new" / "records.jsonl"
    with recording(file, api_keys=(SECRET,)) as server:
        keyed = {"authorization": f"Bearer {SECRET}", "cookie": SECRET}
        for body in (ASKED, ASKED | {"stream": True}, ASKED | {"mind": SECRET}, ASKED | {"model": SECRET}):
            post(server, CHAT, body, **keyed)
        post(server, MESSAGES, {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}, **keyed)
        post(server, CHAT, b'{"messages": "' + SECRET.encode(), **{**keyed, "content-type": "application/json"})
        with server.http(headers=keyed) as client:
            client.get("/v1/models")  # nothing to record
    assert SECRET not in file.read_text()
    found = records(file)
    faults = [(CHAT, None), (CHAT, None), (CHAT, 400), (CHAT, 404), (MESSAGES, None), (CHAT, 400)]
    assert [(each["endpoint"], each["fault"]) for each in found] == faults
    whole, streamed, unknown, model, _, broken = found
    assert "prompt_tokens=7 " in whole["log"] and "finish=stop" in whole["log"]
    assert whole["headers"]["user-agent"] == "cursor/9" and "authorization" not in whole["headers"]
    assert whole["body"]["temperature"] == 0.5 and streamed["body"]["stream"] is True
    assert "error=unknown_parameter" in unknown["log"] and list(unknown["body"])[-1] == "mind"
    assert model["message"].startswith("The model `…` does not exist.")
    assert broken["body"] is None and broken["num_bytes"] == 27
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_record_is_played_again(tmp_path: Path) -> None:
    """The same request, with other words: what reaches the engine has the same structure."""
    file = tmp_path / "records.jsonl"
    with recording(file) as server:
        post(server, CHAT, ASKED)
        post(server, CHAT, ASKED | {"messages": [*ASKED["messages"], {"role": "assistant", "content": "Yes."}]})
        eventually(lambda: len(records(file)) == 2)
        first, second = load(file)
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
    file = tmp_path / "records.jsonl"
    with recording(file) as server:
        post(server, CHAT, body, **{"content-type": "application/json"})
    [found] = load(file)
    assert found.protocol is None and found.endpoint == CHAT


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": SECRET, "content": [{"type": SECRET, "text": SECRET}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": SECRET, "function": {"name": SECRET, "arguments": json.dumps({SECRET: SECRET})}}]}]},
        {"tools": [{"type": "function", "function": {"name": SECRET, "description": SECRET, "parameters": {
            "type": "object", "title": SECRET, "required": [SECRET], "properties": {
                SECRET: {"type": "string", "enum": [SECRET], "default": SECRET, "const": SECRET}}}}}]},
        {"metadata": {SECRET: SECRET}, "user": SECRET, "model": SECRET, "cache_salt": SECRET, "stop": [SECRET]},
        {"prompt": [SECRET, 4711], "input": [[4711], 4711], "logit_bias": {"4711": 1}, "guided_regex": SECRET},
        {"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": SECRET, "name": SECRET, "input": {SECRET: 4711}},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": SECRET}},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SECRET}"}}]}]},
        SECRET,
        *({"tools": [{"parameters": {"type": "object", field: value}}]}
          for field in ("const", "default", "enum", "example", "examples")
          for value in (4711, 4711.5, {SECRET: {"type": LOWER}}, [SECRET, 4711, {"role": LOWER}, [[4711, SECRET]]])),
        *({"input_schema": {"items": {field: {SECRET: at, "type": at}}}}
          for field in ("dependentRequired", "dependentSchemas", "dependencies", "patternProperties", "$defs")
          for at in ([SECRET, LOWER], {"type": LOWER, "const": SECRET})),
        *({field: {SECRET: SECRET, "type": LOWER}, "messages": [{"tool_calls": [{"function": {field: {LOWER: 4711}}}]}]}
          for field in ("arguments", "chat_template_kwargs", "metadata", "mm_processor_kwargs", "input", "logit_bias")),
        *({field: LOWER, "messages": [{field: [LOWER]}]}
          for field in ("role", "type", "format", "status", "tool_choice", "effort", "media_type", "include", "ttl")),
    ],
)  # fmt: skip
def test_nothing_of_a_secret_is_left(body: Any) -> None:
    found = json.dumps(redacted(body, SALT))
    assert "zanzibar" not in found.lower() and "4711" not in found


def test_structure_and_words_of_the_protocols_stay() -> None:
    schema = {
        "type": ["string", "null"],
        "format": "date-time",
        "maxLength": 9,
        "properties": {"const": {"type": "array"}},
    }
    message = {"role": "user", "content": [{"type": "text"}]}
    body = {"messages": [message], "input": [message], "tool_choice": "auto", "parameters": schema}
    made = redacted(body, SALT)
    [(name, of)] = made["parameters"].pop("properties").items()
    assert of == {"type": "array"} and name != "const" and len(name) == 5
    del schema["properties"]
    assert made == body


def test_names_and_equal_texts_stay_equal() -> None:
    schema = {"type": "object", "properties": {"path": {}}, "required": ["path"]}
    texts = ["again and again", "again and again", "other words ...", "a" * 500]
    body = {"tools": [{"name": "ls", "input_schema": schema}], "messages": [{"content": text} for text in texts]}
    made = redacted(body, SALT)
    [tool] = made["tools"]
    assert list(tool["input_schema"]["properties"]) == tool["input_schema"]["required"] != ["path"]
    first, second, third, long = (message["content"] for message in made["messages"])
    assert first == second != third and len(first) == len(third) == 15 and len(long) == 500
    assert made != redacted(body, b"another")


def offered(recorder: RequestRecorder, body: bytes) -> None:
    recorder.offer({"method": "POST", "endpoint": CHAT, "fault": None}, {}, body)


def is_written(number: int, folder: Path) -> bool:
    with suppress(FileNotFoundError):  # the file was renamed just now
        return any(f'"n": {number},' in each.read_text() for each in folder.iterdir())
    return False


def test_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "MAX_BYTES", 20_000)
    recorder = RequestRecorder(tmp_path / "file")
    for number in range(20):
        offered(recorder, json.dumps({"n": number, "messages": [{"content": "x" * 2_000}]}).encode())
        eventually(lambda number=number: is_written(number, tmp_path))
    recorder.close()
    assert 0 < sum(each.stat().st_size for each in tmp_path.iterdir()) < 50_000
    kept = [record["body"]["n"] for name in ("file.1", "file") if (tmp_path / name).exists() for record in
            records(tmp_path / name)]  # fmt: skip
    assert kept == list(range(20))[-len(kept) :]


def test_long_bodies_are_recorded_by_their_length(tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path / "file")
    offered(recorder, b'"' + b"x" * MAX_BODY_BYTES + b'"')
    recorder.close()
    [found] = records(tmp_path / "file")
    assert found["body"] is None and found["num_bytes"] == MAX_BODY_BYTES + 2


def test_what_waits_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    recorder = RequestRecorder(tmp_path / "file")
    for _ in range(50):
        offered(recorder, json.dumps([["x"] * 10_000]).encode())
    recorder.close()
    assert 0 < len(records(tmp_path / "file")) < 50 and "not recorded" in caplog.text


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "records", tmp_path):
        with pytest.raises(ConfigError, match="--record-requests"):
            RequestRecorder(path)


def test_a_file_that_cannot_be_written_any_more_harms_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "records"
    with recording(file) as server:
        file.unlink()
        file.mkdir()
        assert post(server, CHAT, ASKED).status_code == 200
    assert "was not recorded" in caplog.text
