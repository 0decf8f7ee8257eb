"""A server and its worker as processes of the command line, which a test may kill or freeze. Each wait has a limit."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from .commands import COMMAND
from .two_ranks import HOST, free_ports

LIMIT_S = 120.0  # of any wait, however busy the machine is


class Process:
    """A command, with all that it printed."""

    def __init__(self, log: Path, *arguments: str, **variables: str):
        self._log = log
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [*COMMAND, *arguments],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> str:
        """Wait until it has printed a text that matches, and return the match."""
        deadline_s = time.monotonic() + LIMIT_S
        while (found := re.search(text, self.printed)) is None:
            assert self._process.poll() is None and time.monotonic() < deadline_s, f"no {text!r}:\n{self.printed}"
            time.sleep(0.02)
        return found[0]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def code(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end and return its exit code."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            self.send(signal.SIGABRT)  # Python writes the stacks of all threads, whoever holds its lock
            self._process.wait()
            raise AssertionError(f"no end after {limit_s} s:\n{self.printed}") from error

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Macs:
    """A server and a worker of one model. Both may be started again, on the same ports."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model = folder, model
        self.secret = folder / "secret"
        self.secret.write_text("a secret of the tests")
        self.secret.chmod(0o600)
        self.port, self.worker_port = free_ports(2)
        self.server: Process | None = None
        self.worker: Process | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start_server(self, *flags: str) -> Process:
        if self.server is not None:
            self.server.kill()
        ports = ["--port", str(self.port), "--worker-port", str(self.worker_port)]
        ranks = ["--tensor-parallel-size", "2", "--secret-file", str(self.secret)]
        self.server = self._start("server", "serve", str(self.model), *ports, *ranks, *flags)
        return self.server

    def start_worker(self, model: Path | None = None, *, secret: Path | None = None) -> Process:
        if self.worker is not None:
            self.worker.kill()
        place = ["--join", f"{HOST}:{self.worker_port}", "--secret-file", str(secret or self.secret)]
        self.worker = self._start("worker", "worker", str(model or self.model), *place)
        return self.worker

    def start_doctor(self) -> Process:
        """In the place of the server."""
        place = ["--workers", "--quick", "--worker-port", str(self.worker_port), "--secret-file", str(self.secret)]
        self.server = self._start("doctor", "doctor", str(self.model), "--tensor-parallel-size", "2", *place)
        return self.server

    def start(self, *flags: str) -> tuple[Process, Process]:
        """Start both, the worker first, and wait until the server is ready."""
        worker, server = self.start_worker(), self.start_server(*flags)
        server.wait_for("Ctrl-C stops")
        return server, worker

    def end(self) -> None:
        for process in (self.server, self.worker):
            if process is not None:
                process.kill()

    def _start(self, name: str, *arguments: str) -> Process:
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        return Process(self.folder / f"{name}.log", *arguments, HOME=str(home), PYTHONFAULTHANDLER="1")


@contextmanager
def macs(folder: Path, model: Path) -> Iterator[Macs]:
    found = Macs(folder, model)
    try:
        yield found
    finally:
        found.end()


def body(prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A completion that draws the likeliest token, to its full length."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


class Stream(threading.Thread):
    """A streamed completion: its text, the error that ended it, or that its connection was cut."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int):
        super().__init__(daemon=True)
        self.text = ""
        self.num_events = 0
        self.end = ""  # "[DONE]", "cut" or the message of the error
        self._url, self._body = url, body(prompt, max_tokens, stream=True)
        self._changed = threading.Condition()
        self.start()

    def run(self) -> None:
        end = "cut"
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=LIMIT_S) as reply:
                for line in reply.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        end = end if end != "cut" else data
                    elif line.startswith("data: "):
                        end = self._take(json.loads(data)) or end
                    elif reply.status_code != 200 and line:
                        end = str(json.loads(line)["error"]["message"])
        except httpx.TransportError:
            pass  # the server was killed
        with self._changed:
            self.end = end
            self._changed.notify_all()

    def _take(self, event: dict[str, Any]) -> str | None:
        if "error" in event:
            return str(event["error"]["message"])
        with self._changed:
            self.text += event["choices"][0]["text"]
            self.num_events += 1
            self._changed.notify_all()
        return None

    def wait_for(self, num_events: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_events >= num_events, LIMIT_S), self.text

    def ended(self) -> str:
        """Wait for the end, and say how it was."""
        self.join(LIMIT_S)
        assert self.end
        return self.end


def reply(url: str, prompt: list[int], max_tokens: int) -> str:
    """The text of a completion."""
    answer = httpx.post(f"{url}/v1/completions", json=body(prompt, max_tokens), timeout=LIMIT_S)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])
