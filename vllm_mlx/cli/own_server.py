"""The server that `launch` and `chat` start if none runs: it lives as long as its client, and never longer.

The parent holds one end of a pipe that is the server's standard input. When the parent is gone, however it ended, the
pipe closes and the server ends. `python -m vllm_mlx.cli.own_server MODEL` is that server.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from .clients import write_own
from .ending import reported
from .options import load_settings, own_service
from .remote import NoServer, Remote
from .settings import Settings
from .terminal import CommandFailed, SafeConsole, note, one_line, state_folder

_LOOK_S = 0.25  # between two checks whether the server is ready
_ANSWER_S = 2.0  # a server that still loads accepts connections and does not answer
_END_S = 20.0  # beyond --drain-s, until a server that does not end is killed
_SHOWN = 200  # characters of the log's last line on the screen
_LOG_END = 4096  # bytes of the log in which the last line is looked for
_SENT_ON = (signal.SIGTERM, signal.SIGHUP)


def served_name(model: str | None) -> str | None:
    """Return the name under which a checkpoint is served. A folder is served under its own name, without its path."""
    if model in load_settings({}).catalogue().names:
        return model
    return None if model is None else Settings(model=model).served_model_names[0]


def model_to_start(model: str | None, missing: NoServer, command: str) -> str:
    """Return the model for a server that replaces the missing one. Raises CommandFailed if none may start."""
    if own_service() is not None:
        why = "`vllm-mlx service status` says why the service does not answer; while it loads, wait and try again."
        raise CommandFailed(f"{missing.message.partition(' Start')[0]} {why}") from missing
    settings = load_settings({})
    if model is None and "model" not in settings.model_fields_set:
        why = f"Or name a model with --model, and {command} starts a server."
        raise CommandFailed(f"{missing.message} {why}") from missing
    return model or settings.model


@contextmanager
def own_server(server: Remote, model: str, command: str) -> Iterator[None]:
    """Run a server of `model` at the address of `server`, and wait until it answers. Raises CommandFailed."""
    log = state_folder() / command / "server.log"
    note(f"no server runs, so one is started with {model}. Its log is {log}.")
    write_own(log, "")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, model],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is meant for the client
        )
    try:
        _wait_until_ready(process, server, model, log)
        yield
        if process.poll() is not None:
            note(f"the server ended before its client: {_last_line(log)} Its log is {log}.")
    finally:
        assert process.stdin is not None
        process.stdin.close()  # which ends the server, also if this process cannot wait for it
        process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", server: Remote, model: str, log: Path) -> None:
    started_s = time.monotonic()
    probe = replace(server, answer_s=_ANSWER_S)
    with SafeConsole(stderr=True, highlight=False).status("") as status:
        while True:
            told = _last_line(log)
            try:
                probe.ask("/health")
                break
            except CommandFailed as error:  # while weights are read, it says more than the log
                told = error.message if "%" in error.message else told
            if process.poll() is not None:
                raise CommandFailed(f"The server could not start with {model}: {told} Its log is {log}.")
            status.update(Text(f"{time.monotonic() - started_s:.0f} s: {told}"[:_SHOWN]))
            time.sleep(_LOOK_S)
    note(f"the server is ready after {time.monotonic() - started_s:.1f} s.")


def _last_line(log: Path) -> str:
    """Return the last line of the server's log. A progress bar overwrites its own line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_END))
        text = file.read().decode(errors="replace")
    lines = [one_line(line) for line in text.replace("\r", "\n").splitlines()]
    return next((line.removeprefix("vllm-mlx: ") for line in reversed(lines) if line), "nothing is logged yet.")


def run_client(command: list[str], program: str, environment: dict[str, str]) -> int:
    """Run the client in the foreground. Returns its exit code as a shell counts it.

    Ctrl-C reaches the client by itself, and this process continues. It forwards SIGTERM and SIGHUP to the client.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_SENT_ON)}
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN: a program that is started inherits that
    try:
        client = subprocess.Popen(command, executable=program, env=environment)
        for number in _SENT_ON:
            signal.signal(number, lambda number, _: client.send_signal(number))
        code = client.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _end_with_parent(drain_s: float) -> None:
    """Wait until the pipe closes, then end this process: with SIGTERM, and by force if that does not end it in time."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(drain_s + _END_S)
    os._exit(1)


def main() -> None:
    from .serve import run_server

    settings, model = load_settings({}), sys.argv[1]
    if settings.model != model:
        settings = load_settings({"model": model})
    threading.Thread(target=_end_with_parent, args=(settings.drain_s,), daemon=True).start()
    run_server(settings)


if __name__ == "__main__":
    reported(main)
