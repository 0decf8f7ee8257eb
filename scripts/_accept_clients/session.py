"""One client, one session: run in a place of its own, judged by what went over the wire. Prints nothing."""

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .clients import Client, Place
from .faults import Fault
from .install import binary
from .outside import walled_in
from .relay import Relay, Seen, relaying

NOTE = "note"  # short: the demo copies it out of a long prompt
COMMAND = f"cat {NOTE}"
PROMPT = f"Run `{COMMAND}`"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a session came to. `is_right`: what the command prints came back as the result of a call."""

    client: Client
    fault: Fault | None
    seen: list[Seen]
    exit_code: int | None  # None: it had to be ended
    output: str
    wall_s: float
    is_right: bool
    elsewhere: list[str]

    @property
    def errors(self) -> list[str]:
        """Of the protocol, where none was put in between."""
        found = [f"{each.method} {each.path}: {each.status}" for each in self.seen if _is_refused(each)]
        found += [f"{each.path}: an error in the stream" for each in self.seen if each.num_errors]
        return found

    @property
    def is_accepted(self) -> bool:
        return self.exit_code == 0 and self.num_calls > 0 and not self.errors

    @property
    def num_calls(self) -> int:
        """Calls of the model that the client ran, of which the model was told the result."""
        return max((len(each.results) for each in self.seen if each.is_main), default=0)


def _is_refused(seen: Seen) -> bool:
    return seen.fault is None and not 200 <= seen.status < 300


@dataclass(frozen=True, slots=True)
class Setting:
    """Of all sessions."""

    folder: Path  # of the installed clients
    url: str
    model: str
    window: int
    is_trimmed: bool
    limit_s: float


def run_session(client: Client, setting: Setting, fault: Fault | None = None) -> Outcome:
    secret = secrets.token_hex(6)
    relay = Relay(setting.url, fault)
    elsewhere: list[str] = []
    with tempfile.TemporaryDirectory(prefix="accept-") as folder, relaying(relay) as url:
        place = _place(Path(folder), setting, url)
        (place.work / NOTE).write_text(secret + "\n")
        with walled_in(elsewhere) as environment:
            started_s = time.monotonic()
            exit_code, output = _run(client, setting, place, environment)
            wall_s = time.monotonic() - started_s
    is_right = any(secret in result for each in relay.seen for result in each.results)
    return Outcome(client, fault, relay.seen, exit_code, output, wall_s, is_right, sorted(set(elsewhere)))


def _place(folder: Path, setting: Setting, url: str) -> Place:
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    return Place(home, work, url, setting.model, setting.window, setting.is_trimmed)


def _run(client: Client, setting: Setting, place: Place, environment: dict[str, str]) -> tuple[int | None, str]:
    command = client.prepare(place, PROMPT)
    clean = {"HOME": str(place.home), "PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        [str(binary(client, setting.folder)), *command.arguments],
        cwd=place.work,
        env={**clean, **environment, **command.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with _ended(process):
        try:
            output, _ = process.communicate(timeout=setting.limit_s)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            _kill(process)
            output, _ = process.communicate()
            return None, output


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Clients leave helpers behind: the whole session goes."""
    try:
        yield
    finally:
        _kill(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
