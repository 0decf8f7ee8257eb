"""The environment that scripts/setup.sh makes holds what the locks name, whatever else the package index has."""

import ensurepip
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv

from tests.project.sources import ROOT
from tests.support.wheels import write_wheel

# The oldest pip that each supported Python came with; pip of 3.11.0 does not run on a newer Python.
OLDEST_PIPS = {"22.3": (3, 11), "23.2.1": (3, 12), "24.2": (3, 13)}
PROJECT = """[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import shutil

def build_editable(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("project-1-py3-none-any.whl", folder).rpartition("/")[2]
"""


class Checkout:
    """A project with scripts/setup.sh, a lock, and a folder as the package index. Nothing else can be installed."""

    def __init__(self, folder: Path, path: str):
        """`path` is searched for programs."""
        self.folder = folder
        self.index = folder.parent / "index"  # a space ends an address in a setting of pip
        self.index.mkdir()
        folder.mkdir()
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts")
        (folder / "pyproject.toml").write_text(PROJECT)
        (folder / "backend.py").write_text(BACKEND)
        write_wheel(folder, "project", "1")
        (folder / "scripts/requirements-test.lock").touch()
        self.environment = {
            **{name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ},
            "PATH": path,
            "VLLM_MLX_PYTHON": sys.executable,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
            "UV_OFFLINE": "1",
            "UV_FIND_LINKS": str(self.index),
            "UV_CACHE_DIR": str(folder / "uv-cache"),
        }

    def lock(self, *wheels: Path) -> None:
        """Pin these wheels, with the hash of each."""
        lines = []
        for wheel in wheels:
            name, version, _ = wheel.name.split("-", 2)
            lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
        (self.folder / "scripts/requirements.lock").write_text("".join(lines))

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        """Run a function of setup.sh."""
        return subprocess.run(
            ["bash", "-c", f"set -euo pipefail; . scripts/setup.sh; {command}"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def installed(self) -> dict[str, str]:
        """Install by the lock. Return the versions in the environment, by name, without its installers."""
        result = self.run("ensure_environment serve")
        assert result.returncode == 0, result.stderr
        [packages] = (self.folder / ".venv/lib").glob("python*/site-packages")
        found = [re.match(r"(.+)-(.+)\.dist-info$", entry.name) for entry in packages.iterdir()]
        return {name[1]: name[2] for name in found if name and name[1] not in ("pip", "setuptools", "wheel")}


def pinned_packages(checkout: Checkout) -> list[Path]:
    """Fill the index. Return what is to be pinned: a package that asks for an extra of another, and those two."""
    write_wheel(checkout.index, "transformers", "2.0")  # newer than what the lock pins
    return [
        write_wheel(checkout.index, "audio", "1.0", "transformers[chat]>=1.0"),
        write_wheel(checkout.index, "transformers", "1.0", 'jinja>=1.0; extra == "chat"'),
        write_wheel(checkout.index, "jinja", "1.0"),
    ]


@pytest.fixture(params=[pytest.param("pip", marks=pytest.mark.full), "uv"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Checkout:
    folder = tmp_path / "a project"
    tools = tmp_path / "bin"
    tools.mkdir()
    if request.param == "uv":
        (tools / "uv").symlink_to(uv.find_uv_bin())
    checkout = Checkout(folder, f"{tools}:/usr/bin:/bin")
    for wheel in (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"):
        shutil.copy(wheel, checkout.index)
    return checkout


PINNED = {"project": "1", "audio": "1.0", "transformers": "1.0", "jinja": "1.0"}


def test_a_newer_version_in_the_index_changes_nothing(checkout: Checkout) -> None:
    checkout.lock(*pinned_packages(checkout))
    assert checkout.installed() == PINNED


def test_a_package_that_another_lacks_is_an_error_that_names_both(checkout: Checkout) -> None:
    audio, _, jinja = pinned_packages(checkout)
    checkout.lock(audio, jinja)
    result = checkout.run("ensure_environment serve")
    assert result.returncode == 1
    assert "audio" in result.stderr and "transformers" in result.stderr
    assert not list((checkout.folder / ".venv").glob("installed-*")), "what does not fit would be used"


@pytest.mark.parametrize("checkout", ["uv"], indirect=True)
def test_what_an_earlier_lock_named_does_not_stand_in_the_way(checkout: Checkout) -> None:
    old = write_wheel(checkout.index, "old", "1.0", "transformers<2.0")
    packages = pinned_packages(checkout)
    checkout.lock(*packages, old)
    assert checkout.installed() == {**PINNED, "old": "1.0"}
    audio, _, jinja = packages
    checkout.lock(audio, jinja, checkout.index / "transformers-2.0-py3-none-any.whl")
    assert checkout.installed() == {**PINNED, "transformers": "2.0"}


@pytest.mark.full
@pytest.mark.parametrize("version", [*OLDEST_PIPS, "newest"])
def test_each_pip_of_a_supported_python_installs_by_the_lock(tmp_path: Path, version: str) -> None:
    """Downloads that version of pip from the package index of this machine."""
    python = OLDEST_PIPS.get(version, sys.version_info[:2])
    if version == "22.3" and sys.version_info[:2] > python:
        pytest.skip("pip 22.3 runs on Python 3.11 alone")
    checkout = Checkout(tmp_path / "a project", "/usr/bin:/bin")
    name = "pip" if version == "newest" else f"pip=={version}"
    command = [sys._base_executable, "-m", "pip", "download", "--no-deps", "--dest", str(checkout.index), name]
    subprocess.run(command, capture_output=True, check=True)
    made = checkout.run(f'create_environment && "$python" -m pip install --upgrade {name}')
    assert made.returncode == 0, made.stderr
    [wheel] = checkout.index.glob("pip-*.whl")
    answer = checkout.run('"$python" -m pip --version')
    assert answer.stdout.startswith(f"pip {wheel.name.split('-')[1]} ")
    checkout.lock(*pinned_packages(checkout))
    assert checkout.installed() == PINNED
