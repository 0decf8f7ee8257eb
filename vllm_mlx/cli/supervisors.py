"""The server under launchd and systemd: the definition that each reads, and the commands that each takes."""

import os
import plistlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .terminal import CommandFailed

LABEL = "local.vllm-mlx"
UNIT = "vllm-mlx.service"
THROTTLE_S = 30  # between two starts
OPEN_FILES = 8192
_ASK_S = 0.25
_CONTROL = r"\0-\x1f\x7f"  # characters, as in a class of a pattern
_UNIT_ESCAPES = str.maketrans(
    {"\\": r"\\", '"': r"\"", "%": "%%"} | {chr(code): f"\\x{code:02x}" for code in (*range(32), 127)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The facts that a supervisor needs of the server. It holds no setting and no key."""

    command: tuple[str, ...]
    home: Path
    user: str | None  # the user of a service that starts with the machine; None for one that starts at log-in
    early_log: Path  # gets the output of the program before it opens its own log
    stop_s: int  # the time that the server has between SIGTERM and SIGKILL
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """The state of a service: known to the supervisor or not, and the process that runs."""

    is_installed: bool
    pid: int | None = None


class Launchd:
    """macOS' supervisor. It restarts after every exit code but 0, and cannot tell an error from a crash."""

    name = "launchd"

    def __init__(self, job: Job) -> None:
        self._job = job
        self._domain = "system" if job.user else f"gui/{os.getuid()}"

    @property
    def path(self) -> Path:
        """Return the file of the definition."""
        folder = Path("/Library/LaunchDaemons") if self._job.user else self._job.home / "Library/LaunchAgents"
        return folder / f"{LABEL}.plist"

    def definition(self) -> str:
        """Return a property list. Raises CommandFailed for a text that no property list holds."""
        job = self._job
        values = {
            "Label": LABEL,
            "ProgramArguments": list(job.command),
            "EnvironmentVariables": {"HOME": str(job.home), **job.environment},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": job.stop_s,
            "ProcessType": "Interactive",  # other types get less of the processor
            "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
            "StandardOutPath": str(job.early_log),
            "StandardErrorPath": str(job.early_log),
            "WorkingDirectory": str(job.home),
        }
        values |= {"UserName": job.user} if job.user else {}
        with suppress(ValueError):
            text = plistlib.dumps(values, sort_keys=False)
            if plistlib.loads(text) == values:
                return text.decode()
        raise CommandFailed(f"launchd takes no control character in a path: {values!a}. Choose another folder.")

    def start(self) -> None:
        """Start the service by the definition on disk; one that runs ends first. Raises CommandFailed."""
        self.stop()
        _run("launchctl", "enable", self._target)
        _run("launchctl", "bootstrap", self._domain, str(self.path))

    def stop(self) -> None:
        """End the server, which may finish its replies, and forget the service. Raises CommandFailed."""
        if not self.state().is_installed:
            return
        _ask("launchctl", "bootout", self._target)  # its exit code differs between releases, so the state decides
        most_s = self._job.stop_s + 10
        deadline_s = time.monotonic() + most_s
        while self.state().is_installed:
            if time.monotonic() > deadline_s:
                raise CommandFailed(f"launchd has not ended the service within {most_s:.0f} s. Try again later.")
            time.sleep(_ASK_S)

    def state(self) -> State:
        answer = _ask("launchctl", "print", self._target)
        pids = [line.split("=")[1].strip() for line in answer.stdout.splitlines() if line.strip().startswith("pid =")]
        return State(answer.returncode == 0, int(pids[0]) if pids else None)

    @property
    def _target(self) -> str:
        return f"{self._domain}/{LABEL}"


class Systemd:
    """The supervisor of most Linux systems."""

    name = "systemd"

    def __init__(self, job: Job) -> None:
        self._job = job
        self._systemctl = ("systemctl",) if job.user else ("systemctl", "--user")

    @property
    def path(self) -> Path:
        """Return the file of the definition."""
        folder = Path("/etc/systemd/system") if self._job.user else self._job.home / ".config/systemd/user"
        return folder / UNIT

    def definition(self) -> str:
        """Return a unit file. Raises CommandFailed for a path that no unit file holds."""
        job = self._job
        program, *arguments = job.command
        own_log = str(job.early_log)
        for text, refused in (
            (program, _CONTROL + r"\"'\\"), (own_log, _CONTROL), *((text, "") for text in job.environment.values())
        ):  # fmt: skip
            if found := re.search(f"[{refused}\ud800-\udfff]", text):
                raise CommandFailed(f"systemd takes no {found[0]!a} in {text!a}. Choose another folder.")
        command = [_quoted(program), *(_quoted(word.replace("$", "$$")) for word in arguments)]
        variables = [f"Environment={_quoted(f'{name}={value}')}" for name, value in job.environment.items()]
        own_log = own_log.replace("%", "%%")
        lines = [
            "[Unit]",
            "Description=vllm-mlx",
            "After=network.target",
            "StartLimitIntervalSec=0",  # the server counts its own starts
            "",
            "[Service]",
            f"ExecStart={' '.join(command)}",
            *([f"User={job.user.replace('%', '%%')}"] if job.user else []),
            *variables,
            "Restart=on-failure",
            f"RestartSec={THROTTLE_S}",
            f"TimeoutStopSec={job.stop_s}",
            f"LimitNOFILE={OPEN_FILES}",
            "NoNewPrivileges=true",
            f"StandardOutput=append:{own_log}",
            f"StandardError=append:{own_log}",
            "",
            "[Install]",
            f"WantedBy={'multi-user.target' if job.user else 'default.target'}",
        ]
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        """Start the service by the definition on disk; one that runs ends first. Raises CommandFailed."""
        _run(*self._systemctl, "daemon-reload")
        _run(*self._systemctl, "enable", UNIT)
        _run(*self._systemctl, "restart", UNIT)

    def stop(self) -> None:
        """End the server, which may finish its replies, and forget the service. Raises CommandFailed."""
        if self.path.exists():
            _run(*self._systemctl, "disable", "--now", UNIT)

    def state(self) -> State:
        answer = _ask(*self._systemctl, "show", UNIT, "--property=LoadState,MainPID")
        values = dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)
        return State(values.get("LoadState") == "loaded", int(values.get("MainPID") or 0) or None)


Supervisor = Launchd | Systemd
supervisor: type[Supervisor] = Launchd if sys.platform == "darwin" else Systemd  # of this system


def program_path(argument: str) -> Path:
    """Return the absolute path of this program that stays the same at an upgrade. `argument` is how it was called.

    Homebrew keeps each version in a separate folder, and a link to the newest one in `opt`.
    """
    path = Path(shutil.which(argument) or argument).absolute()
    parts = path.parts
    if "Cellar" in parts:
        at = parts.index("Cellar")
        return Path(*parts[:at], "opt", parts[at + 1], *parts[at + 3 :])
    return path


def _quoted(word: str) -> str:
    """Return a word of a unit file, in which `%` begins a specifier."""
    return f'"{word.translate(_UNIT_ESCAPES)}"'


def _ask(*command: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CommandFailed(
            f"`{command[0]}` cannot be run: {error.strerror}. Without launchd or systemd, start `vllm-mlx serve` "
            "with a supervisor of your own."
        ) from error


def _run(*command: str) -> None:
    result = _ask(*command)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise CommandFailed(f"`{' '.join(command)}` failed: {lines[-1] if lines else 'it does not say why'}")
