"""The shell entry points, run for real."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.sources import ROOT
from tests.support.commands import write_script

TOOLS_IN_FOLDERS = ("bench", "replay", "accept-clients", "soak", "fuzz", "check-drift")
SCRIPTS = ("serve", "test", "check", *TOOLS_IN_FOLDERS, "vllm-mlx", "lock", "install", "formula")
TOOLS = ("bash", "env", "cat", "cmp", "dirname", "rm", "sed")


# Stands for the environment's Python: notes what it is asked to run.
NOTING = """#!/bin/sh
case "$1" in -m) echo "$@" >>"$NOTES" ;; esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project, in a folder with a space in its name."""
    folder = tmp_path / "a project"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("vllm_mlx", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def installed(project: Path) -> Path:
    """The same project with an environment whose Python notes what it is asked to run."""
    write_script(project / ".venv/bin/python", NOTING)
    write_script(project / ".venv/bin/vllm-mlx", "#!/bin/sh\n")
    return project


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the few programs that the scripts need; there is no Python and no uv."""
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    return tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_run_and_parses(name: str) -> None:
    script = ROOT / "scripts" / name
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


# Of newer versions of bash, or of GNU's tools: macOS has bash 3.2 and BSD's.
NEWER = re.compile(
    r"""mapfile|readarray|declare\s+-[Ag]|local\s+-n|coproc|\$\{\w+(,|\^)|\$\{\w+@|&>>|\|&|;;&|;&|\[\[\s+-v|EPOCH|BASHPID|
    \$\{\w+:\s-|printf\s+-v|\btimeout\s|readlink\s+-f|realpath|sed\s+-i|grep\s+-\w*P|date\s+-d|stat\s+-c|\bnproc\b|
    cp\s+--|mktemp\s+--|xargs\s+-r|sort\s+-V|head\s+-n\s+-""",
    re.VERBOSE,
)


@pytest.mark.parametrize("name", [*SCRIPTS, "setup.sh", "_run"])
def test_a_script_runs_in_the_bash_of_macos(name: str) -> None:
    script = (ROOT / "scripts" / name).read_text(encoding="utf-8")
    code = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    assert NEWER.findall(code) == []


def test_without_a_recent_python_the_script_says_what_to_do(project: Path, tools: Path) -> None:
    write_script(tools / "python3", "#!/bin/sh\nexit 1\n")  # as macOS's own: there, and too old
    environment = {"PATH": str(tools), "HOME": str(tools)}
    result = subprocess.run(
        ["bash", str(project / "scripts/serve")], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "No Python 3.11 or newer was found. Install one" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_the_lock_files_name_is_installed_by_hash_and_again_once_they_change(installed: Path, tools: Path) -> None:
    notes = tools / "notes"
    environment = {"PATH": str(tools), "HOME": str(tools), "NOTES": str(notes)}  # without uv

    def commands(script: str) -> list[str]:
        notes.write_text("")
        subprocess.run(["bash", str(installed / "scripts" / script)], env=environment, capture_output=True, check=True)
        return [line for line in notes.read_text().splitlines() if "pip install" in line]

    lock, test_lock = (installed / "scripts" / name for name in ("requirements.lock", "requirements-test.lock"))
    packages, itself = commands("serve")
    assert packages.endswith(f"--require-hashes -r {lock}")
    assert itself.endswith(f"--no-deps --no-build-isolation --editable {installed}")
    assert commands("serve") == []
    packages, _ = commands("test")
    assert packages.endswith(f"--require-hashes -r {lock} -r {test_lock}")
    assert commands("serve") == commands("test") == []
    with lock.open("a") as file:
        file.write("# changed\n")
    assert len(commands("serve")) == 2


def test_install_links_the_command_of_the_clone_and_takes_it_away(installed: Path, tmp_path: Path) -> None:
    link = tmp_path / ".local/bin/vllm-mlx"
    environment = {"PATH": f"{link.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "NOTES": str(tmp_path / "notes")}

    def install(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [str(installed / "scripts/install"), *flags]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    for _ in range(2):
        result = install()
        assert result.returncode == 0 and link.readlink() == installed / ".venv/bin/vllm-mlx"
        assert "export PATH" not in result.stderr and "comes first" not in result.stderr
    assert install("--uninstall").returncode == 0 and not link.is_symlink()
    assert install("--uninstall").returncode == 1
    link.write_text("another")
    result = install()
    assert result.returncode == 1 and "belongs to another installation" in result.stderr
    assert link.read_text() == "another"
    link.unlink()
    environment["PATH"] = "/usr/bin:/bin"
    assert "export PATH" in install().stderr


@pytest.mark.parametrize("name", TOOLS_IN_FOLDERS)
def test_a_tool_is_the_folder_of_its_name(installed: Path, tmp_path: Path, name: str) -> None:
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "NOTES": str(tmp_path / "notes")}  # without uv
    command = [str(installed / "scripts" / name), "--some", "flag"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    module = f"_{name.replace('-', '_')}"
    assert (tmp_path / "notes").read_text().splitlines()[-1] == f"-m scripts.{module} --some flag"
    assert (ROOT / "scripts" / module / "__main__.py").exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a GPU")
def test_the_checks_of_a_gpu_say_that_they_did_not_run_where_there_is_none(project: Path, tools: Path) -> None:
    command = ["bash", str(project / "scripts/check"), "--gpu"]
    result = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (3, "") and result.stderr.startswith("NOT RUN: ")
    assert not (project / ".venv").exists() and not (project / ".venv-gpu").exists()


def test_the_checks_of_a_mac_are_a_mode_of_check(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "scripts/check"), "--mac"]
    for flags in ([], ["--wiring", "--yes"]):
        environment = {**os.environ, "PATH": "/usr/bin:/bin", "NOTES": str(tmp_path / "notes")}  # without uv
        subprocess.run([*command, *flags], cwd=tmp_path, env=environment, capture_output=True, check=True)
        assert (tmp_path / "notes").read_text().splitlines()[-1] == " ".join(["-m scripts._mac", *flags])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_serve_sets_itself_up_once_in_a_folder_with_spaces(project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    command = [str(project / "scripts/serve"), "--help"]
    first = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=True)
    assert "Installing into" in first.stderr
    assert "--max-num-seqs" in first.stdout
    second = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=True, timeout=10)
    assert second.stderr == ""
    assert "--max-num-seqs" in second.stdout
    with (project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    third = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=True)
    assert "Installing into" in third.stderr


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_a_process_is_described_without_ps(tmp_path: Path) -> None:
    """By one that begins here: a worker of these tests may have too many files open to read /proc."""
    code = """
import os, sys
from tests.support.harm.vitals import Vitals
vitals = Vitals(os.getpid())
assert sys.executable in vitals.command_line() and vitals.memory_bytes() > 1 << 20
while not vitals.cpu_s() > 0:
    pass
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PATH": str(tmp_path)}, check=True, timeout=60)
