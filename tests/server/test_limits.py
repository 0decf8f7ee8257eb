"""What one client may ask of the server, and how slowly. Over a real socket; every refusal names its limit."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import httpx
import pytest

from tests.support.running import Running, eventually, named, post_bytes, serving
from vllm_mlx.core.errors import ConfigError, InvalidParameter
from vllm_mlx.core.events import Started, TextDelta
from vllm_mlx.core.messages import ToolSpec
from vllm_mlx.core.request import Request, RequestLimits
from vllm_mlx.server.bodies import BODIES
from vllm_mlx.server.config import ConnectionLimits, ServerConfig
from vllm_mlx.server.guards import RateLimit
from vllm_mlx.util.json_values import is_deeper

from .fakes import PROMPT_TOKENS, FakeEngine, Pause, Script, finished

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: Any = {"messages": MESSAGES}
JSON = {"content-type": "application/json"}
SCHEMA: Any = {"type": "object", "properties": {"x": {"enum": ["y" * 300]}}}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS: Any = [{**TOOL, "function": {**TOOL["function"], "name": name}} for name in ("f", "g", "h")]
TREE: Any = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
OPTIONS = {"limits": RequestLimits(max_messages=3, max_tools=2, max_schema_bytes=200, max_choices=5)}


@pytest.mark.parametrize(
    ("path", "body", "param", "flag"),
    [
        ("/v1/chat/completions", {**CHAT, "response_format": TREE}, "response_format", "--max-schema-bytes"),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, "n", "--max-choices"),
        ("/v1/messages/count_tokens", {"messages": MESSAGES * 4}, None, "--max-messages"),
    ],
)
def test_more_than_a_request_may_hold(
    server: Running, http: httpx.Client, path: str, body: Any, param: str | None, flag: str
) -> None:
    """`tests/golden/refusals.py` has the other limits."""
    num_before = len(server.engine.requests)
    refused = http.post(path, json={"model": "tiny", **body})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert flag in error["message"] and error.get("param") == param
    assert len(server.engine.requests) == num_before


def test_a_schema_far_beyond_its_limit_is_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_mlx.core.request.json.dumps", None)
    for schema in ({"description": "x" * 500}, {"enum": [1] * 500}, {"properties": {str(n): {} for n in range(99)}}):
        tool = ToolSpec("f", None, schema, param="tools")
        with pytest.raises(InvalidParameter, match="--max-schema-bytes"):
            RequestLimits(max_schema_bytes=200).check(Request(request_id="a", prompt="b", tools=(tool,)))


def test_what_is_within_the_limits_is_taken(http: httpx.Client) -> None:
    for body in ({"messages": MESSAGES * 3, "n": 5}, {**CHAT, "tools": TOOLS[:2]}):
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_depth_is_counted_exactly() -> None:
    for depth in range(6):
        value: Any = 1
        for _ in range(depth):
            value = {"a": [0, value]} if depth % 2 == 0 and isinstance(value, int) and depth > 1 else [value]
        text = json.dumps(value)
        deepest = max((text[:end].count("[") + text[:end].count("{") - text[:end].count("]") - text[:end].count("}"))
                      for end in range(len(text) + 1))  # fmt: skip
        assert not is_deeper(value, deepest)
        assert deepest == 0 or is_deeper(value, deepest - 1)


def test_one_client_s_rate() -> None:
    with serving(FakeEngine(), max_requests_per_minute=2, api_keys=("a", "b")) as server:
        with server.http(headers={"x-api-key": "a"}) as client:
            assert [client.post("/v1/chat/completions", json=CHAT).status_code for _ in range(2)] == [200, 200]
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert client.get("/v1/models").status_code == 200, "looking costs nothing"
            message = client.post("/v1/messages", json={"model": "tiny", "max_tokens": 5, **CHAT}).json()
        with server.http(headers={"x-api-key": "b"}) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200, "another key has its own rate"
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "--max-requests-per-minute" in error["message"] and "Please try again in" in error["message"]
    assert message["error"]["type"] == "rate_limit_error"


def test_the_rate_comes_back_with_time() -> None:
    now = [0.0]
    rate = RateLimit(60, clock=lambda: now[0])
    assert [rate.take("x") for _ in range(60)] == [0.0] * 60
    assert rate.take("x") == pytest.approx(1.0)
    now[0] = 1.0
    assert rate.take("x") == 0.0
    assert rate.take("x") == pytest.approx(1.0)


def answer(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def refusal(raw: bytes) -> tuple[int, str]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.fixture(scope="module")
def impatient() -> Iterator[Running]:
    limits = ConnectionLimits(max_connections=20, max_header_bytes=2000, head_s=0.5)
    with serving(FakeEngine(), connections=limits, body_s=0.5) as running:
        yield running


@pytest.mark.parametrize("sent", [b"", b"POST /v1/mess", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_headers_that_do_not_come(impatient: Running, sent: bytes) -> None:
    with impatient.connect() as connection:
        connection.sendall(sent)
        status, message = refusal(answer(connection))
    assert status == 408 and "0.5 seconds" in message


def test_headers_that_drip(impatient: Running) -> None:
    with impatient.connect() as connection:
        connection.sendall(b"\r\n")
        started_s = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - started_s < 10:
                connection.sendall(b"\r\n")
                time.sleep(0.05)


def test_a_body_that_does_not_come(impatient: Running) -> None:
    whole = post_bytes("/v1/chat/completions", json.dumps(CHAT))
    with impatient.connect() as connection:
        connection.sendall(whole[:-5])
        status, message = refusal(answer(connection))
    assert status == 408 and "too slowly" in message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_bodies_that_together_are_too_much(path: str) -> None:
    """They stay with their requests: what replies under way have sent counts until they end."""
    num_played = count()

    def play(request: Request, index: int) -> Script:
        end = Pause(None) if next(num_played) < BODIES else finished()
        return (Started(PROMPT_TOKENS, 0), TextDelta("hello"), end)

    body = {"messages": [{"role": "user", "content": "h" * 70_000}], "max_tokens": 5}
    with serving(FakeEngine(play), max_body_bytes=71_000) as server, ExitStack() as replies, server.http() as client:
        streams = [client.stream("POST", path, json={**body, "stream": True}) for _ in range(BODIES)]
        lines = [replies.enter_context(stream).iter_lines() for stream in streams]
        assert all(next(each) for each in lines)
        refused = client.post(path, json=body)
        assert refused.status_code == 429, refused.text
        assert refused.headers["retry-after"] == "5"
        assert "--max-body" in refused.json()["error"]["message"]
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert client.post(path, json={**CHAT, "max_tokens": 5}).status_code == 200, "a short one finds room"
        replies.close()
        eventually(lambda: client.post(path, json=body).status_code == 200)


def test_bodies_of_one_key_leave_room_for_those_of_another() -> None:
    """Bodies that never end, of one key; each but the last 10 bytes is here."""
    body = json.dumps({"messages": [{"role": "user", "content": "h" * 70_000}], "max_tokens": 5})
    stalling = post_bytes("/v1/chat/completions", body).replace(b"\r\n", b"\r\nx-api-key: ann\r\n", 1)[:-10]
    with ExitStack() as held, serving(FakeEngine(), max_body_bytes=71_000, api_keys=("ann", "ben")) as server:
        ann, ben = (held.enter_context(server.http(headers={"x-api-key": key})) for key in ("ann", "ben"))
        for _ in range(BODIES):
            held.enter_context(server.connect()).sendall(stalling)

        def status_of(client: httpx.Client) -> int:
            return client.post("/v1/chat/completions", content=body, headers=JSON).status_code

        eventually(lambda: status_of(ann) == 429)
        assert [status_of(ben) for _ in range(5)] == [200] * 5
        assert status_of(ann) == 429


def test_a_long_body_that_stalls_has_no_more_time_than_a_short_one() -> None:
    with serving(FakeEngine(), body_s=0.5, max_body_bytes=4_000_000) as server, server.connect() as connection:
        started_s = time.monotonic()
        connection.sendall(post_bytes("/v1/chat/completions", json.dumps({**CHAT, "user": "u" * 3_000_000}))[:-5])
        status, message = refusal(answer(connection))
        assert status == 408 and "too slowly" in message
        assert time.monotonic() - started_s < 60  # 3 MB at the least rate would take most of an hour


def test_a_long_body_that_keeps_coming_is_taken() -> None:
    body = post_bytes("/v1/chat/completions", json.dumps({**CHAT, "user": "u" * 24_000}))
    with serving(FakeEngine(), body_s=1.0) as server, server.connect() as connection:
        for start in range(0, len(body), 1000):
            connection.sendall(body[start : start + 1000])
            time.sleep(0.05)  # all of it takes longer than a body may that stalls
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_reply_may_take_its_time(impatient: Running) -> None:
    with impatient.http() as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        time.sleep(0.7)  # longer than headers may take: a connection that idles between requests is no slow one
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_its_reply(stream: bool) -> None:
    """More than any socket buffers. The row is let go though the reply would have gone on for ever."""

    def play(request: Request, index: int) -> Script:
        endless = [Pause(None)] if stream else [finished()]
        return (Started(PROMPT_TOKENS, 0), *[TextDelta("x" * (1 << 20))] * 24, *endless)

    with serving(FakeEngine(play), connections=ConnectionLimits(take_s=0.5)) as server, server.connect() as connection:
        connection.sendall(post_bytes("/v1/chat/completions", json.dumps({**CHAT, "stream": stream})))
        assert connection.recv(12) == b"HTTP/1.1 200"
        eventually(lambda: not server.server.server_state.connections)
        eventually(lambda: len(server.engine.aborted if stream else server.engine.finished) == 1)


@pytest.mark.parametrize("name", ["x-long", "x" * 3000])
@pytest.mark.parametrize("whole", [True, False])
def test_headers_that_are_too_long(impatient: Running, name: str, whole: bool) -> None:
    end = b"\r\n\r\n" if whole else b""
    with impatient.connect() as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nHost: localhost\r\n{name}: {'y' * 3000}".encode() + end)
        status, message = refusal(answer(connection))
    assert status == 431 and "2000 bytes" in message


def test_a_long_body_is_no_long_header(impatient: Running) -> None:
    body = {**CHAT, "user": "u" * 200_000}
    with impatient.connect() as connection:
        connection.sendall(post_bytes("/v1/chat/completions", json.dumps(body)))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_more_connections_than_there_may_be() -> None:
    with serving(FakeEngine(), connections=ConnectionLimits(max_connections=5)) as server:
        idle = [server.connect() for _ in range(5)]
        eventually(lambda: len(server.server.server_state.connections) == 5)
        with server.http() as client:
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert client.get("/health").status_code == 200
        assert refused.status_code == 429 and "--max-connections" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "5" and refused.headers["connection"] == "close"
        more = [server.connect() for _ in range(20)]
        eventually(lambda: len(server.server.server_state.connections) <= 10)
        for connection in [*idle, *more]:
            connection.close()
        eventually(lambda: not server.server.server_state.connections)
        with server.http() as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize(
    "make",
    [
        lambda: RequestLimits(max_tools=0),
        lambda: ConnectionLimits(head_s=0),
        lambda: ConnectionLimits(take_s=0),
        lambda: ServerConfig(models=named("m"), max_requests_per_minute=0),
        lambda: ServerConfig(models=named("m"), body_s=0),
    ],
)
def test_limits_that_let_nothing_in(make: Any) -> None:
    with pytest.raises(ConfigError, match="must be greater than 0"):
        make()
