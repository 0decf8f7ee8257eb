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

from vllm_mlx.cli.client_files import write_own

from .clients import Client, Place
from .faults import Fault
from .install import binary, search_path
from .outside import walled_in
from .relay import Relay, Seen, relaying

NOTES = ("note", "last")  # short: the demo copies the first out of a long prompt
COMMANDS = tuple(f"cat {note}" for note in NOTES)
PROMPT = f"Run `{COMMANDS[0]}`"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a session came to. `is_right`: what each command prints came back as the result of a call."""

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
        has_called = self.num_calls > 0 or not self.client.calls
        return self.exit_code == 0 and bool(self.seen) and has_called and not self.errors

    @property
    def num_calls(self) -> int:
        """Calls of the model that the client ran, of which the model was told the result."""
        return max((len(each.results) for each in self.seen if each.is_main), default=0)


def _is_refused(seen: Seen) -> bool:
    """A path that is not there is no error for a client that only looks which server this is."""
    is_look = seen.method in ("GET", "HEAD") and seen.status == 404
    return seen.fault is None and not is_look and not 200 <= seen.status < 300


@dataclass(frozen=True, slots=True)
class Setting:
    """Of all sessions."""

    folder: Path  # of the installed clients
    url: str
    model: str
    window: int
    is_trimmed: bool
    limit_s: float
    num_calls: int = 1  # that the model makes


def run_session(client: Client, setting: Setting, fault: Fault | None = None) -> Outcome:
    marks = [secrets.token_hex(6) for _ in NOTES]
    relay = Relay(setting.url, fault)
    elsewhere: list[str] = []
    with tempfile.TemporaryDirectory(prefix="accept-") as folder, relaying(relay) as url:
        place = _place(Path(folder), setting, url)
        for note, mark in zip(NOTES, marks, strict=True):
            (place.work / note).write_text(mark + "\n")
        with walled_in(elsewhere) as environment:
            started_s = time.monotonic()
            exit_code, output = _run(client, setting, place, environment)
            wall_s = time.monotonic() - started_s
    results = "".join(result for each in relay.seen for result in each.results)
    is_right = all(mark in results for mark in marks[: setting.num_calls])
    return Outcome(client, fault, relay.seen, exit_code, output, wall_s, is_right, sorted(set(elsewhere)))


def _place(folder: Path, setting: Setting, url: str) -> Place:
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    return Place(home, work, url, setting.model, setting.window, setting.is_trimmed)


def _run(client: Client, setting: Setting, place: Place, environment: dict[str, str]) -> tuple[int | None, str]:
    plan = client.plan(place)
    for path, text in plan.files.items():
        write_own(path, text)
    clean = {"HOME": str(place.home), "PATH": search_path(setting.folder), "TERM": "dumb", "LANG": "C.UTF-8"}
    variables = {**clean, **environment, **plan.environment}
    outputs = []
    for arguments in client.runs(place, PROMPT):
        code, output = _run_once([str(binary(client, setting.folder)), *arguments], place, variables, setting.limit_s)
        outputs.append(output)
        if code != 0:
            return code, "".join(outputs)
    return 0, "".join(outputs)


def _run_once(command: list[str], place: Place, environment: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    process = subprocess.Popen(
        command,
        cwd=place.work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with _ended(process):
        try:
            output, _ = process.communicate(timeout=limit_s)
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
