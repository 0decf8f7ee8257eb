"""npm packages of the clients into one folder. Runs no client."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .clients import Client


class AcceptError(Exception):
    """The clients cannot be run. The message says why."""


def install(clients: Sequence[Client], folder: Path) -> None:
    """What is not there in its version. npm runs with a home of its own."""
    missing = list(dict.fromkeys(each.spec for each in clients if _installed(each, folder) != each.version))
    if not missing:
        return
    npm = shutil.which("npm")
    if npm is None:
        raise AcceptError("npm was not found: install Node.js.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        # --force: the binaries are native, whatever Node.js their package asks for.
        result = subprocess.run(
            [npm, "install", "--prefix", str(folder), "--force", "--no-audit", "--no-fund", *missing],
            env={**os.environ, "HOME": home},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        raise AcceptError(f"npm could not install {' '.join(missing)}:\n{result.stderr[-2000:]}")


def binary(client: Client, folder: Path) -> Path:
    return folder / "node_modules" / ".bin" / client.binary


def _installed(client: Client, folder: Path) -> str | None:
    try:
        package = json.loads((folder / "node_modules" / client.package / "package.json").read_text())
    except (OSError, ValueError):
        return None
    return str(package.get("version"))
