"""A real server process with two keys, and the look at what requests leave behind in it."""

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.commands import address, served

from .vitals import Vitals

ATTACKER, OTHER = "attacker-0123456789", "another-0123456789"
MAX_PIXELS = 20_000_000
# State that is kept on purpose stays small beside the limit on memory, and no reply takes minutes.
FLAGS = ("--max-model-len", "4096", "--cache-memory", "16MB", "--media-cache-bytes", "16MB", "--max-request-s", "30",
         "--max-image-pixels", str(MAX_PIXELS), "--max-request-pixels", str(MAX_PIXELS))  # fmt: skip
PIXEL_BYTES = 12 * MAX_PIXELS  # of the images that the server decodes at once: an array, and Pillow's own copies

COMMAND = [sys.executable, "-m", "tests.support.harm.trimmed"]
TRIM_S = 0.1  # for the process to give freed memory back
TRACE_LINES = 12


@dataclass(frozen=True, slots=True)
class Target:
    port: int
    vitals: Vitals
    log: Path
    _read_to: list[int] = field(default_factory=lambda: [0])  # of the log

    def status(self) -> dict[str, Any]:
        return self.get("/v1/status").json()

    def get(self, path: str, timeout_s: float = 60) -> httpx.Response:
        headers = {"Authorization": f"Bearer {OTHER}"}
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.get(url, headers=headers, timeout=timeout_s, trust_env=False, verify=False).raise_for_status()

    def held_bytes(self) -> int:
        """The resident memory without what the allocator keeps for later."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.vitals.pid, signal.SIGUSR2)
        time.sleep(TRIM_S)
        return self.vitals.memory_bytes()

    def left(self) -> list[str]:
        """What `/v1/status` shows of requests, when nobody should have one."""
        status = self.status()
        found = {name: status[name] for name in ("num_running", "num_waiting", "num_preparing") if status.get(name)}
        found |= {"requests": len(status["requests"])} if status["requests"] else {}
        return [f"{name}: {number}" for name, number in found.items()]

    def new_traceback(self) -> str:
        """The end of the last traceback since this was last asked; empty where there is none."""
        with self.log.open(errors="replace") as file:
            file.seek(self._read_to[0])
            text = file.read()
            self._read_to[0] = file.tell()
        _, mark, last = text.rpartition("Traceback (most recent call last):")
        lines = re.split(r"\n\d{4}-\d\d-\d\d ", last, maxsplit=1)[0].rstrip().splitlines()
        return "\n".join(lines[-TRACE_LINES:]) if mark else ""


@contextmanager
def target(model: str = "demo", *flags: str) -> Iterator[Target]:
    """A served checkpoint. Its log goes to a file."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys, log = folder / "keys", folder / "log"
        keys.write_text(f"{ATTACKER}\n{OTHER}\n")
        keys.chmod(0o600)
        arguments = (model, "--api-key-file", str(keys), *FLAGS, *flags)
        errors = stack.enter_context(log.open("w"))
        process, printed = stack.enter_context(served(*arguments, stderr=errors, command=COMMAND))
        yield Target(httpx.URL(address(printed)).port or 80, Vitals(process.pid), log)
