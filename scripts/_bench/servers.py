"""The servers under test, each a process of its own on a free loopback port. It sends no prompts."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .client import MODEL_NAME, BenchmarkError
from .figures import OURS, Aim

_START_S = 300.0
_STOP_S = 10.0
_LOG_TAIL = 2000  # characters shown of a server that did not start


def our_command(model: Path, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm_mlx", "serve", str(model)),
        *("--served-model-name", MODEL_NAME, "--port", str(port)),
    ]


def _mlx_lm_command(model: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port", str(port)]


@dataclass(frozen=True, slots=True)
class Rival:
    """The server that this one is compared with: mlx-lm's, or the one of another checkout of this repository."""

    name: str
    command: Callable[[Path, int], list[str]]
    checkout: Path | None = None

    def aim(self, bound: float, *, at_least: bool) -> Aim:
        """Return an aim for the ratio of ours to theirs. `bound` is for mlx-lm's; a checkout may be better by 5 %."""
        if self.checkout is not None:
            bound = 0.95 if at_least else 1.05
        return Aim(bound=bound, at_least=at_least, against=self.name)


MLX_LM = Rival("mlx-lm server", _mlx_lm_command)


def other_checkout(folder: Path) -> Rival:
    return Rival("other checkout", our_command, folder)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def both_running(model: Path, rival: Rival) -> Iterator[dict[str, int]]:
    """Run this server and the other one during the block. Yields their ports."""
    ports = {OURS: free_port(), rival.name: free_port()}
    theirs = running(rival.command(model, ports[rival.name]), ports[rival.name], rival.checkout)
    with running(our_command(model, ports[OURS]), ports[OURS]), theirs:
        yield ports


@contextlib.contextmanager
def running(command: list[str], port: int, checkout: Path | None = None) -> Iterator[None]:
    """Run the server during the block, with the package of `checkout` if one is given. It is stopped in any case."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_MLX_")}
    environment["VLLM_MLX_CACHE_DISK"] = "0"  # state of an earlier server would be read instead of computed
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(checkout), environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile() as log:
        # A new session: the terminal's Ctrl-C reaches this program alone, which then stops the server.
        process = subprocess.Popen(
            command, env=environment, cwd=checkout, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if not _await_ready(process, port):
                log.seek(0)
                tail = log.read().decode(errors="replace")[-_LOG_TAIL:]
                raise BenchmarkError(f"The server did not start: {' '.join(command)}\n{tail}")
            yield
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        if _is_healthy(port):
            return True
        time.sleep(0.1)
    return False


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
