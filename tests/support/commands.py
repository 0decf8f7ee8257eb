"""Commands as processes: `serve` until it is ready, and any other to its end. Knows no test."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

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


def address(printed: str) -> str:
    """Of a server, from what it printed."""
    match = re.search(r"curl (http://[^/ ]+)", printed)
    assert match is not None
    return match[1]


def run(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**_KEEPS_NOTHING, **os.environ, "COLUMNS": "200", "NO_COLOR": "1", **variables}
    command = [*COMMAND, *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def refusal(*arguments: str, code: int = 1, **variables: str) -> str:
    """The one line that a command which fails prints."""
    result = run(*arguments, **variables)
    assert (result.returncode, result.stdout) == (code, "")
    [line] = result.stderr.splitlines()
    return line
