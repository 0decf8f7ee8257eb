"""launchd and systemd as far as a service meets them: when they start a program, how they end it, and their commands.

Their waits are shortened by SPEED, so that ten restarts take a second. The rules are those of `launchd.plist(5)` and
`systemd.service(5)`.
"""

import json
import os
import plistlib
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SPEED = 100
_CLEAN = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGPIPE}  # ends by these are successes for systemd
_SHIM = """#!{python}
import json, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    line.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    code, text = json.loads(line.makefile().read())
sys.stdout.write(text)
sys.exit(code)
"""


@dataclass(slots=True)
class Program:
    """One service: its process, and the thread that starts it again."""

    command: list[str]
    environment: dict[str, str]
    output: str
    wait_s: float  # between two starts
    stop_s: float
    restarts: Callable[[int], bool]  # by the exit code, negative for a signal
    num_starts: int = 0
    codes: list[int] = field(default_factory=list)
    process: "subprocess.Popen[bytes] | None" = None
    is_wanted: bool = True
    thread: threading.Thread | None = None

    def start(self) -> None:
        self.thread = threading.Thread(target=self._keep, daemon=True)
        self.thread.start()

    def _keep(self) -> None:
        while self.is_wanted:
            self.num_starts += 1
            with Path(self.output).open("ab") as output:
                self.process = subprocess.Popen(
                    self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            code = self.process.wait()
            self.codes.append(code)
            self.process = None
            if not self.restarts(code):
                return
            time.sleep(self.wait_s / SPEED)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for a program that has not ended in its time."""
        self.is_wanted = False
        if (process := self.process) is not None:
            process.terminate()
            try:
                process.wait(self.stop_s)
            except subprocess.TimeoutExpired:
                process.kill()
        if self.thread is not None:
            self.thread.join()


class Machine:
    """A machine with `launchctl` and `systemctl` on its PATH, which is `folder / "bin"` and the real one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: dict[str, Program] = {}
        address = str(folder / "socket")
        (folder / "bin").mkdir()
        for name, answer in {"launchctl": self._launchctl, "systemctl": self._systemctl}.items():
            shim = folder / "bin" / name
            shim.write_text(_SHIM.format(python=sys.executable, address=f"{address}-{name}"))
            shim.chmod(0o755)
            threading.Thread(target=self._serve, args=(f"{address}-{name}", answer), daemon=True).start()

    @property
    def path(self) -> str:
        return f"{self._folder / 'bin'}:{os.environ['PATH']}"

    @property
    def job(self) -> Program | None:
        """The service, while the supervisor knows it."""
        return next(iter(self._jobs.values()), None)

    def close(self) -> None:
        for job in self._jobs.values():
            job.stop()

    def _serve(self, address: str, answer: Callable[[list[str]], tuple[int, str]]) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()
            while True:
                line, _ = listening.accept()
                with line, suppress(OSError):
                    arguments = json.loads(line.makefile().readline())
                    line.sendall(json.dumps(answer(arguments)).encode())

    def _launchctl(self, arguments: list[str]) -> tuple[int, str]:
        match arguments:
            case ["enable", _]:
                return 0, ""
            case ["print", target]:
                if (job := self._jobs.get(target)) is None:
                    return 113, "Could not find service"
                return 0, "" if job.process is None else f"\tpid = {job.process.pid}\n"
            case ["bootstrap", domain, path]:
                values = plistlib.loads(Path(path).read_bytes())
                target = f"{domain}/{values['Label']}"
                if target in self._jobs:
                    return 5, "Bootstrap failed: 5: Input/output error"
                assert values["RunAtLoad"] and values["KeepAlive"] == {"SuccessfulExit": False}
                self._start(
                    target,
                    Program(
                        values["ProgramArguments"],
                        {"PATH": "/usr/bin:/bin", **values["EnvironmentVariables"]},
                        values["StandardOutPath"],
                        values["ThrottleInterval"],
                        values["ExitTimeOut"],
                        lambda code: code != 0,
                    ),
                )
                return 0, ""
            case ["bootout", target] if target in self._jobs:
                self._jobs[target].stop()
                del self._jobs[target]
                return 0, ""
            case _:
                return 3, "Boot-out failed: 3: No such process"

    def _systemctl(self, arguments: list[str]) -> tuple[int, str]:
        unit = Path(os.environ["HOME"]) / ".config/systemd/user" / "vllm-mlx.service"
        match [word for word in arguments if word != "--user"]:
            case ["daemon-reload"] | ["enable", _]:
                return 0, ""
            case ["show", name, "--property=LoadState,MainPID"]:
                job = self._jobs.get(name)
                state = "loaded" if unit.exists() else "not-found"
                pid = 0 if job is None or job.process is None else job.process.pid
                return 0, f"LoadState={state}\nMainPID={pid}\n"
            case ["restart", name]:
                if (job := self._jobs.pop(name, None)) is not None:
                    job.stop()
                values = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line)
                assert values["Restart"] == "on-failure"
                self._start(
                    name,
                    Program(
                        shlex.split(values["ExecStart"]),
                        {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"]},
                        values["StandardOutput"].removeprefix("append:"),
                        int(values["RestartSec"]),
                        int(values["TimeoutStopSec"]),
                        lambda code: code != 0 and code not in _CLEAN,
                    ),
                )
                return 0, ""
            case ["disable", "--now", name]:
                if (job := self._jobs.pop(name, None)) is not None:
                    job.stop()
                return 0, ""
            case _:
                return 1, f"Unknown command {arguments}."

    def _start(self, name: str, job: Program) -> None:
        self._jobs[name] = job
        job.start()
