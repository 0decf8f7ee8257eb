"""`vllm-mlx launch` where no server runs: real processes, a client that is a script, and no server that is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from scripts.served import free_port
from tests.cli.terminal import Terminal, terminal
from tests.support.commands import COMMAND, call, refusal, stand_in
from vllm_mlx.cli.own_server import run_client

_CLIENT = """
import os, signal, sys, urllib.request
if '--wait' in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))
with urllib.request.urlopen(os.environ['ANTHROPIC_BASE_URL'] + '/health') as answer:
    print(answer.status, os.environ['ANTHROPIC_MODEL'], sys.argv[1:], flush=True)
if '--wait' in sys.argv:
    sys.stdin.read()
sys.exit(7)
"""
_PATIENCE_S = 120.0


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A free one, at which `launch` looks for a server; `claude` is a script."""
    stand_in(tmp_path / "bin" / "claude", _CLIENT)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("VLLM_MLX_CACHE_DISK", "0")
    monkeypatch.setenv("VLLM_MLX_TEXT_ONLY", "true")
    number = free_port()
    monkeypatch.setenv("VLLM_MLX_PORT", str(number))
    return number


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until_closed(port: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while is_open(port):
        assert time.monotonic() < deadline, "the server outlived its client"
        time.sleep(0.05)


@contextmanager
def launched(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`launch` as a shell starts it: the leader of a process group, which Ctrl-C reaches as a whole."""
    with subprocess.Popen(
        [*COMMAND, "launch", "claude", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_server_is_started_ctrl_c_is_the_client_s_and_both_end_together(port: int) -> None:
    with launched("--model", "demo", "--", "--wait") as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "200 demo ['--permission-mode', 'default', '--wait']\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert is_open(port)
        process.stdin.close()
        assert process.wait(_PATIENCE_S) == 7
        told = process.stderr.read()
    log = Path(os.environ["HOME"]) / ".local/state/vllm-mlx/launch/server.log"
    assert f"one is started with demo. Its log is {log}." in told and "is ready after" in told
    assert "is ready, " in log.read_text() and log.stat().st_mode & 0o077 == 0
    assert not is_open(port)


@pytest.mark.full
def test_a_kill_leaves_no_server(port: int) -> None:
    with launched("--model", "demo", "--", "--wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "200 demo ['--permission-mode', 'default', '--wait']\n"
        process.kill()  # nothing of it can run any more
        wait_until_closed(port)


def test_ctrl_c_while_the_model_is_loaded_ends_both(port: int) -> None:
    with launched("--model", "demo") as process:
        assert process.stderr is not None
        assert "one is started" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(_PATIENCE_S) == 130
    assert not is_open(port)


def test_signals_mean_the_same_after_the_client() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert run_client((sys.executable, "-c", "raise SystemExit(7)"), sys.executable, {}) == 7
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_server_that_cannot_start_says_why(port: int) -> None:
    result = call("launch", "claude", "--model", "nonsense")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("vllm-mlx: The server could not start with nonsense: ") and "No folder nonsense" in last


def test_nothing_is_started_that_was_not_asked_for(port: int) -> None:
    assert "name a model with --model, and launch" in refusal("launch", "claude")
    assert "No server answers at" in refusal("launch", "claude", "--model", "demo", "--print")
    line = refusal("launch", "claude", "--model", "demo", PATH="/nowhere")
    assert line.startswith("vllm-mlx: Claude Code is not installed")


def test_another_program_on_the_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("VLLM_MLX_PORT", str(taken.getsockname()[1]))
        line = refusal("launch", "claude", "--model", "demo")
    assert "did not answer in time" in line and "VLLM_MLX_PORT" in line


def test_a_server_with_another_model_is_an_error(demo_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLX_PORT", str(urlsplit(demo_url).port))
    line = refusal("launch", "claude", "--model", "org/other", code=2)
    assert f"{demo_url} does not serve org/other. It serves demo. Leave out --model" in line


@contextmanager
def talking(*arguments: str) -> Iterator[Terminal]:
    with terminal("chat", "--no-history", "--no-thinking", "--temperature", "0", *arguments) as seen:
        yield seen


def test_chat_starts_a_server_talks_and_ends_it(port: int) -> None:
    with talking("--model", "demo") as seen:
        seen.wait_for("one is started with demo")
        seen.wait_for("is ready after")
        seen.wait_for(f"demo at http://127.0.0.1:{port}")
        seen.type("What is 2 + 3?")
        seen.wait_for(r"2 \+ 3 = 5[\s\S]*cached[\s\S]*›")
        time.sleep(2)  # the prompt is shown before it waits for keys, and a signal in between shows no other
        seen.process.send_signal(signal.SIGINT)  # at the prompt, the conversation goes on
        seen.wait_for("›")
        assert is_open(port)
        seen.press(b"\x04")
        assert seen.process.wait(_PATIENCE_S) == 0
    assert not is_open(port)


@pytest.mark.parametrize("moment", ["one is started", "Loading demo|loading its models"])
def test_ctrl_c_while_chat_s_model_is_loaded_ends_both(port: int, moment: str) -> None:
    with talking("--model", "demo") as seen:
        seen.wait_for(moment)
        seen.process.send_signal(signal.SIGINT)
        assert seen.process.wait(_PATIENCE_S) == 130
    wait_until_closed(port)


def test_chat_in_a_pipe_starts_a_server_with_the_model_of_the_settings(port: int) -> None:
    asked = ("chat", "What is 2 + 3?", "--temperature", "0", "--no-thinking")
    result = call(*asked, VLLM_MLX_MODEL="demo")
    assert (result.returncode, result.stdout) == (0, "2 + 3 = 5\n"), result.stderr
    assert not is_open(port)
    failed = call(*asked, "--model", "nonsense")
    assert failed.returncode == 1 and "could not start with nonsense: " in failed.stderr.splitlines()[-1]
    assert "name a model with --model, and chat starts a server." in refusal(*asked)
    assert "No server answers at" in refusal(*asked, "--model", "demo", "--url", f"http://127.0.0.1:{port}")
    assert not is_open(port)
