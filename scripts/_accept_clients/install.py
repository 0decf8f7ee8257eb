"""The packages of the clients, from npm and PyPI, into one folder. Runs no client."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .clients import Client


class AcceptError(Exception):
    """The clients cannot be run. The message says why."""


_NODE = "node@24.21.0"  # some clients need a newer one than the machine has


def install(clients: Sequence[Client], folder: Path) -> list[tuple[Client, str]]:
    """Install what is not there in its version. Returns what cannot be installed, and why."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [one for one in clients if _installed(one, folder) != one.version]
    if any(one.manager == "npm" for one in missing) and not (_bin(folder) / "node").exists():
        _npm(_NODE, folder)
    failed: dict[str, str] = {}
    for spec, one in {one.spec: one for one in missing}.items():
        trouble = _npm(spec, folder) if one.manager == "npm" else _pip(one, folder)
        if trouble is not None:
            failed[spec] = trouble
    return [(one, failed[one.spec]) for one in clients if one.spec in failed]


def _npm(spec: str, folder: Path) -> str | None:
    npm = shutil.which("npm")
    if npm is None:
        raise AcceptError("npm was not found: install Node.js.")
    # --force: the binaries are native, whatever Node.js their package asks for.
    return trouble_of([npm, "install", "--prefix", str(folder), "--force", "--no-audit", "--no-fund", spec])


def _pip(client: Client, folder: Path) -> str | None:
    """Every package has an environment of its own, because their requirements contradict each other."""
    place = _venv(client, folder)
    command = [sys.executable, "-m", "venv", "--clear", str(place)]
    return trouble_of(command) or trouble_of([str(place / "bin" / "pip"), "install", "-q", client.spec])


def trouble_of(command: list[str]) -> str | None:
    """The end of what a command that failed said. It runs with a home of its own."""
    with tempfile.TemporaryDirectory() as home:
        result = subprocess.run(command, env={**os.environ, "HOME": home}, capture_output=True, text=True, check=False)
    return (result.stderr or result.stdout).strip()[-500:] or "no reason given" if result.returncode else None


def binary(client: Client, folder: Path) -> Path:
    return (_bin(folder) if client.manager == "npm" else _venv(client, folder) / "bin") / client.binary


def search_path(folder: Path) -> str:
    """Where programs are looked for: the installed Node.js comes first."""
    return f"{_bin(folder)}{os.pathsep}{os.environ['PATH']}"


def _bin(folder: Path) -> Path:
    return folder / "node_modules" / ".bin"


def _venv(client: Client, folder: Path) -> Path:
    return folder / f"venv-{client.package}"


def _installed(client: Client, folder: Path) -> str | None:
    if client.manager == "pip":
        name = client.package.replace("-", "_")
        found = list(_venv(client, folder).glob(f"lib/*/site-packages/{name}-{client.version}.dist-info"))
        return client.version if found else None
    try:
        package = json.loads((folder / "node_modules" / client.package / "package.json").read_text())
    except (OSError, ValueError):
        return None
    return str(package.get("version"))
