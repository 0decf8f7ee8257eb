"""Installs the packages of the clients, from npm and PyPI, into one folder; runs a program until it ends, and ends the
processes that it leaves behind.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .clients import Client


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


_NODE = "node@24.21.0"  # some clients need a newer one than the machine has
_LIMIT_S = 1800.0
_SHOWN = 500  # characters of the output of a failed command


def install(client: Client, folder: Path) -> str | None:
    """Install the client in its version if it is missing. Returns the reason if it cannot be installed."""
    folder.mkdir(parents=True, exist_ok=True)
    if _installed(client, folder) == client.version:
        return None
    if client.manager == "pip":
        return _pip(client, folder)
    has_node = (_bin(folder) / "node").exists()
    return (None if has_node else _npm(_NODE, folder)) or _npm(client.spec, folder)


def _npm(spec: str, folder: Path) -> str | None:
    npm = shutil.which("npm")
    if npm is None:
        return "npm was not found: install Node.js."
    # --force: the binaries are native, whatever Node.js their package asks for.
    return trouble_of([npm, "install", "--prefix", str(folder), "--force", "--no-audit", "--no-fund", spec])


def _pip(client: Client, folder: Path) -> str | None:
    """Install into an environment for this package alone: requirements of packages contradict each other."""
    place = _venv(client, folder)
    command = [sys.executable, "-m", "venv", "--clear", str(place)]
    return trouble_of(command) or trouble_of([str(place / "bin" / "pip"), "install", "-q", client.spec])


def trouble_of(command: list[str], limit_s: float = _LIMIT_S) -> str | None:
    """Run a command with an empty home directory. Returns the end of its output if it failed."""
    with tempfile.TemporaryDirectory() as home:
        code, output = run_program(command, limit_s=limit_s, environment={**os.environ, "HOME": home})
    if code == 0:
        return None
    said = " ".join(output.split())[-_SHOWN:] or "It gave no reason."
    return said if code is not None else f"It had not ended after {limit_s:.0f} s. {said}"


def binary(client: Client, folder: Path) -> Path:
    if client.program is not None:
        return folder / "node_modules" / client.package / client.program
    return (_bin(folder) if client.manager == "npm" else _venv(client, folder) / "bin") / client.command


def search_path(folder: Path) -> str:
    """Return the value of PATH, with the installed Node.js first."""
    return f"{_bin(folder)}{os.pathsep}{os.environ['PATH']}"


def _bin(folder: Path) -> Path:
    return folder / "node_modules" / ".bin"


def _venv(client: Client, folder: Path) -> Path:
    return folder / f"venv-{client.package}"


def _installed(client: Client, folder: Path) -> str | None:
    """Return the installed version, or None. An interrupted installation may lack the program."""
    if not binary(client, folder).exists():
        return None
    if client.manager == "pip":
        name = client.package.replace("-", "_")
        found = list(_venv(client, folder).glob(f"lib/*/site-packages/{name}-{client.version}.dist-info"))
        return client.version if found else None
    try:
        package = json.loads((folder / "node_modules" / client.package / "package.json").read_text())
    except (OSError, ValueError):
        return None
    return str(package.get("version"))
