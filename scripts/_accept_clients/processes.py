"""Runs a program until it ends, and ends the processes that it leaves behind."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_program(
    command: Sequence[str],
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[int | None, str]:
    """Run the command in a new session. Returns its exit code and its output.

    The code is None if the program had not ended after `limit_s` seconds and was killed.
    """
    # A file, not a pipe: a helper that survives the program in another session would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")
