"""Commands: `serve` as a process until it is ready, and any other to its end, as a process or in this one."""

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

import pytest

from vllm_mlx.cli.ending import reported
from vllm_mlx.cli.main import make_app

_KEEPS_NOTHING = {"VLLM_MLX_CACHE_DISK": "0"}  # in the user's own folder, unless a flag or a variable names another
COMMAND = [sys.executable, "-c", "from vllm_mlx.cli.main import main; main()"]


@contextmanager
def served(
    *arguments: str, stderr: TextIO | None = None, command: Sequence[str] = COMMAND, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and what it printed up to the moment it was ready. `stderr`: where its log goes."""
    process = subprocess.Popen(
        [*command, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**_KEEPS_NOTHING, **os.environ, **variables},
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        yield process, "".join(lines)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def write_script(file: Path, text: str) -> None:
    """A program that can be run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def stand_in(program: Path, code: str) -> None:
    """A program that runs Python code. By way of a shell: the interpreter's path can have a space in it."""
    write_script(program, f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", code])} "$@"\n')


def address(printed: str) -> str:
    """Of a server, from what it printed."""
    match = re.search(r"curl (http://[^/ ]+)", printed)
    assert match is not None
    return match[1]


def run(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process: for what happens as one starts or ends, or becomes another program."""
    command = [*COMMAND, *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=_environment(variables), timeout=120, check=False
    )


def call(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which has imported already what takes a new one more than a second."""
    logger = logging.getLogger("vllm_mlx")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in _environment(variables).items():
            patch.setenv(name, value)
        hub = os.environ.get("HF_HUB_CACHE") or Path.home() / ".cache/huggingface/hub"
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))  # which has read the variables once
        streams = [stack.enter_context(TemporaryFile("w+", encoding="utf-8", buffering=1)) for _ in range(3)]
        streams[0].write(stdin)
        streams[0].seek(0)
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        patch.setattr(sys, "argv", ["vllm-mlx", *arguments])
        patch.setattr(sys, "excepthook", sys.excepthook)  # Typer sets its own
        patch.delattr(os, "execve")  # the tests would end without a word
        try:
            reported(make_app())
            code: object = 0
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            logger.setLevel(level)
            logging.captureWarnings(False)
        assert isinstance(code, int)
        for stream in streams:
            stream.seek(0)
        return subprocess.CompletedProcess(arguments, code, streams[1].read(), streams[2].read())


def _environment(variables: dict[str, str]) -> dict[str, str]:
    return {**_KEEPS_NOTHING, **os.environ, "COLUMNS": "200", "NO_COLOR": "1", **variables}


def refusal(*arguments: str, code: int = 1, **variables: str) -> str:
    """The one line that a command which fails prints."""
    result = call(*arguments, **variables)
    assert (result.returncode, result.stdout) == (code, "")
    [line] = result.stderr.splitlines()
    return line
