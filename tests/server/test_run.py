"""From the socket to Ctrl-C."""

import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx
import pytest

from tests.support.protocols import PROTOCOLS
from tests.support.rows import cases
from tests.support.running import Running, eventually, post_bytes, serving, start_python
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.core.events import TextDelta
from vllm_mlx.core.stage import LoadStage
from vllm_mlx.server import run
from vllm_mlx.server.run import answering_before, listen

from .fakes import FakeEngine, Pause, finished

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_taken_port_is_said() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} on 127.0.0.1 is taken. Choose another with --port"):
            listen("127.0.0.1", port)


def test_a_port_is_free_again_at_once() -> None:
    with serving(FakeEngine()) as server, server.http() as client:
        client.get("/health")
        port = server.port
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_ours_is_said(host: str) -> None:
    with pytest.raises(ConfigError, match="is not an address of this machine"):
        listen(host, 0)


def test_localhost_and_ipv6() -> None:
    listen("localhost", 0).close()
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        listen("::1", 0).close()


def _ask(server: Running, answers: list[Any], **fields: Any) -> threading.Thread:
    def ask() -> None:
        with server.http() as client:
            answers.append(client.post("/v1/chat/completions", json={**CHAT, **fields}))

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: bool(server.engine.running))
    return thread


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_reply_may_finish_while_draining(stream: bool) -> None:
    engine = FakeEngine(play=lambda request, index: (TextDelta("a"), Pause(0.5), TextDelta("b"), finished()))
    answers: list[Any] = []
    with serving(engine, drain_s=30) as server:
        asking = _ask(server, answers, stream=stream)
        server.server.should_exit = True
        asking.join(120)
    [answer] = answers
    assert answer.status_code == 200 and "finish_reason" in answer.text
    assert engine.shutdowns == [30] and engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_finish_in_time_is_told(stream: bool) -> None:
    engine = FakeEngine(play=lambda request, index: (TextDelta("a"), Pause()))
    answers: list[Any] = []
    with serving(engine, drain_s=0.1) as server:
        asking = _ask(server, answers, stream=stream)
        server.server.should_exit = True
        asking.join(120)
    [answer] = answers
    body = answer.text.split("data: ")[-2] if stream else answer.text
    assert json.loads(body)["error"]["message"] == "The server is shutting down."
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert answer.status_code == (200 if stream else 503)


PATHS = {protocol.path: protocol.body("hi") for protocol in PROTOCOLS.values()}


def _code(answer: dict[str, Any]) -> str:
    """In each protocol's place."""
    error = answer["error"]
    return str(error["details"]["error_code"] if answer.get("type") == "error" else error["code"])


@pytest.mark.parametrize("path", PATHS)
def test_a_request_whose_prompt_is_prepared_is_refused_at_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(prepares_for_ever=True)
    answers: list[httpx.Response] = []
    with caplog.at_level(logging.ERROR), serving(engine, drain_s=30) as server, server.http() as client:
        asking = threading.Thread(target=lambda: answers.append(client.post(path, json=PATHS[path])))
        asking.start()
        eventually(lambda: bool(engine.requests))
        server.server.should_exit = True
        asking.join(120)
    [answer] = answers
    assert (answer.status_code, _code(answer.json())) == (503, "shutting_down")
    assert int(answer.headers["retry-after"]) > 0 and answer.headers["x-request-id"]
    assert not caplog.records


@pytest.mark.parametrize("path", PATHS)
def test_a_request_whose_body_has_not_come_is_refused_at_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = post_bytes(path, json.dumps(PATHS[path]))
    with caplog.at_level(logging.ERROR), serving(FakeEngine()) as server, server.connect() as connection:
        connection.sendall(whole[:-9])
        with server.http() as client:
            eventually(lambda: bool(client.get("/health").is_success))
        server.server.should_exit = True
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert b" 503 " in head.splitlines()[0]
    assert _code(json.loads(body)) == "shutting_down"
    assert not caplog.records


SERVE = """
import gc, logging, sys
from tests.server.fakes import FakeEngine, Pause, hello
from tests.support.running import named
from vllm_mlx.core.events import TextDelta
from vllm_mlx.core.stage import LoadStage
from vllm_mlx.server.app import create_app
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.run import listen, run

loaded = [[] for _ in range(100_000)]

def started():
    [changed], intervals = engine.watchers, []
    for is_busy in (True, False):
        changed(is_busy)
        intervals.append(sys.getswitchinterval())
    print(sock.getsockname()[1], gc.get_freeze_count(), len(gc.get_objects()), *intervals, flush=True)

sock = listen("127.0.0.1", 0)
engine = FakeEngine(play=lambda request, index: hello(request, index) if engine.requests[1:] else endless)
app = create_app(engine, ServerConfig(models=named("tiny")))
endless = (TextDelta("a"), Pause())
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
run(app, engine, sock, drain_s={drain_s}, started=started)
print(engine.shutdowns)
"""


@contextlib.contextmanager
def process(drain_s: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server, and its port. Its process is set up for threads, and for what is loaded at its start."""
    started = start_python(SERVE.format(drain_s=drain_s))
    assert started.stdout is not None
    try:
        port, left_out, looked_through, busy_s, usual_s = map(float, started.stdout.readline().split())
        assert left_out > 100_000 > looked_through, "what is loaded is left out of garbage collections"
        assert busy_s == pytest.approx(run.SWITCH_S), "while prompts are prepared"
        assert usual_s == sys.getswitchinterval()
        yield started, int(port)
    finally:
        started.kill()
        started.communicate()


@contextlib.contextmanager
def streaming(port: int) -> Iterator[TextIO]:
    """An endless reply, of which one piece was read."""
    body = json.dumps({**CHAT, "stream": True})
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(post_bytes("/v1/chat/completions", body))
        reader = connection.makefile()
        while "content" not in reader.readline():
            pass
        yield reader


def ended(server: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """Exit code, what it printed, and what it logged of signals."""
    out, err = server.communicate(timeout=120)
    assert "Traceback" not in err
    return server.returncode, out.strip(), [line for line in err.splitlines() if line.startswith("vllm_mlx.server.run")]


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # one handler takes them all


@pytest.mark.full  # with every run: one that ignores SIGHUP
@pytest.mark.parametrize("stop", STOPS)
def test_a_signal_ends_an_idle_server_with_exit_code_0(stop: signal.Signals) -> None:
    with process(drain_s=3600) as (server, _):
        server.send_signal(stop)
        line = (
            f"vllm_mlx.server.run {stop.name}: running replies get 3600 seconds to finish. Ctrl-C again ends them now."
        )
        assert ended(server) == (0, "[3600]", [line])


@pytest.mark.parametrize("stop", cases(STOPS[:2], [signal.SIGINT]))
def test_a_second_signal_does_not_wait_for_the_drain(stop: signal.Signals) -> None:
    with process(drain_s=3600) as (server, port), streaming(port) as reader:
        for each in (signal.SIGHUP, signal.SIGHUP):  # as a terminal may send it when it closes
            server.send_signal(each)
            eventually(lambda: _is_draining(port))
        server.send_signal(stop)
        rest = reader.read()
        assert "shutting down" in rest
        code, out, _ = ended(server)
        assert (code, out) == (0, "[3600, 0]")


def test_a_server_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with process(drain_s=0) as (server, port):
            server.send_signal(signal.SIGHUP)
            assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
            server.send_signal(signal.SIGTERM)
            code, out, [line] = ended(server)
            assert (code, out) == (0, "[0]") and "SIGTERM: " in line
    finally:
        signal.signal(signal.SIGHUP, before)


def _is_draining(port: int) -> bool:
    """Whether new requests are refused."""
    return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT, trust_env=False).status_code == 503


def test_a_client_that_does_not_read_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "LAST_EVENTS_S", 1)
    engine = FakeEngine(play=lambda request, index: (*(TextDelta("x" * 60_000) for _ in range(500)), Pause()))
    with caplog.at_level(logging.WARNING), serving(engine) as server, server.connect() as connection:
        connection.sendall(post_bytes("/v1/chat/completions", json.dumps({**CHAT, "stream": True})))
        eventually(lambda: bool(engine.running))
    assert len(engine.aborted) == 1
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/messages", "/v1/chat/completions", "/"])
def test_a_port_that_is_open_answers_before_the_models_are_there(path: str) -> None:
    """And the server that follows on the same socket gets all later connections."""
    with listen("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with (
            answering_before(sock, LoadStage("tiny", "reading weights", 0.4)),
            httpx.Client(base_url=url, trust_env=False) as client,
        ):
            for _ in range(2):
                answer = client.request("POST" if path.startswith("/v1/m") else "GET", path)
                assert answer.status_code in (503, 529)
                assert "loading its models (tiny: reading weights, 40%)." in str(answer.json()["error"])
                facts = {"status": "loading", "stage": "reading weights", "progress": 0.4}
                assert path != "/health" or answer.json().items() >= facts.items()
                assert path == "/health" or int(answer.headers["retry-after"]) > 0
        with socket.create_connection(sock.getsockname(), timeout=30), sock.accept()[0]:
            pass
