"""Definitions that launchd and systemd read, and the files of a service that root installs for another user."""

import os
import plistlib
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.test_service import files_below, service
from tests.support.commands import write_script
from vllm_mlx.cli import service as cli
from vllm_mlx.cli.supervisors import Job, Launchd, Systemd, program_path
from vllm_mlx.cli.terminal import CommandFailed

_JOB = Job(
    command=("/Users/me/.local/bin/vllm-mlx", "service", "run"),
    home=Path("/Users/me"),
    user=None,
    early_log=Path("/Users/me/Library/Logs/vllm-mlx/service-start.log"),
    stop_s=40,
    environment={"HF_HOME": "/Volumes/My disk/hf"},
)


def test_the_definitions_are_what_the_supervisors_read() -> None:
    values = plistlib.loads(Launchd(_JOB).definition().encode())
    assert values["ProgramArguments"] == list(_JOB.command) and values["KeepAlive"] == {"SuccessfulExit": False}
    assert values["ExitTimeOut"] == 40 and values["ProcessType"] == "Interactive" and "UserName" not in values
    unit = Systemd(_JOB).definition()
    assert 'Environment="HF_HOME=/Volumes/My disk/hf"' in unit and "Restart=on-failure" in unit


# Characters of a path, and how a unit holds them in a variable: systemd.syntax(7) and systemd.exec(5).
_ODD = {"%h": "%%h", "${HOME}": "${HOME}", "a b": "a b", "o'b": "o'b", 'q"': r"q\"", "b\\": r"b\\", "l\nb": r"l\x0ab"}


@pytest.mark.parametrize("name", _ODD)
def test_a_definition_keeps_any_path(name: str) -> None:
    job = replace(_JOB, environment={"HF_HOME": f"/{name}/x", "HF_ENDPOINT": name})
    unit = Systemd(job).definition()
    assert f'\nEnvironment="HF_HOME=/{_ODD[name]}/x"\nEnvironment="HF_ENDPOINT={_ODD[name]}"\n' in unit
    job = replace(job, command=(f"/{name}/vllm-mlx", "service", "run"), early_log=Path(f"/{name}/start.log"))
    values = plistlib.loads(Launchd(job).definition().encode())
    assert values["ProgramArguments"][0] == f"/{name}/vllm-mlx" and values["StandardOutPath"] == f"/{name}/start.log"
    assert values["EnvironmentVariables"]["HF_HOME"] == f"/{name}/x"


@pytest.mark.parametrize("name", ["l\nb", "\r", "\udce9", "\x7f"])
def test_a_path_that_no_unit_holds_is_refused(name: str) -> None:
    for job in (replace(_JOB, command=(f"/{name}/vllm-mlx",)), replace(_JOB, early_log=Path(f"/{name}/start.log"))):
        with pytest.raises(CommandFailed, match="Choose another folder"):
            Systemd(job).definition()
    if name in ("\r", "\udce9"):
        with pytest.raises(CommandFailed, match="Choose another folder"):
            Launchd(job).definition()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("name", ["a b", "$x ${HOME}", "%h", "#;é"])
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    program, unit = tmp_path / name / "vllm-mlx", tmp_path / "vllm-mlx.service"
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    job = replace(_JOB, command=(str(program), "service", "run"), early_log=program.with_name("start.log"))
    unit.write_text(Systemd(job).definition())
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["systemd-analyze", "verify", "--user", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and not result.stderr, result.stderr


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of root with the home of `nobody`, and a supervisor whose files are there."""
    if os.geteuid() != 0:
        pytest.skip("only root writes into the homes of others")
    with tempfile.TemporaryDirectory() as name:
        folder, nobody = Path(name), pwd.getpwnam("nobody")
        folder.chmod(0o755)
        for made in ("home", "bin", "units", "victim"):
            (folder / made).mkdir(mode=0o755)
        (folder / "victim" / "service.toml").write_text("root's\n")
        os.chown(folder / "home", nobody.pw_uid, nobody.pw_gid)
        entry = pwd.struct_passwd((*nobody[:5], str(folder / "home"), nobody[6]))
        monkeypatch.setattr(pwd, "getpwnam", lambda _: entry)
        monkeypatch.setattr(cli, "SYSTEM_LOG", folder / "units" / "start.log")
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        write_script(folder / "bin" / "systemctl", "#!/bin/sh\n[ $(id -u) = 0 ]\n")

        class Unit(Systemd):
            path = folder / "units" / "vllm-mlx.service"  # type: ignore[assignment]

        monkeypatch.setattr(cli, "supervisor", Unit)
        yield folder


def owners(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_uid for path in folder.rglob("*")}


def test_the_files_of_a_service_that_root_installs_belong_to_its_user(roots: Path) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    (roots / "home" / ".config").mkdir()  # root's folder stays root's
    (roots / "home" / ".config").chmod(0o777)
    for _ in range(2):
        assert service("install", "demo", "--system", "nobody", "--api-key", "sk-a-secret")[0] == 0
        of = owners(roots / "home")
        assert of.pop(".config") == 0 and set(of.values()) == {nobody}
        assert {".config/vllm-mlx/service.toml", ".config/vllm-mlx/service-keys.toml", ".local/state"} <= of.keys()
        assert owners(roots / "units") == {"vllm-mlx.service": 0, "start.log": nobody}
        unit = roots / "units" / "vllm-mlx.service"
        assert os.geteuid() == 0 and "\nUser=nobody\n" in unit.read_text() and unit.stat().st_mode & 0o777 == 0o644
    assert service("uninstall", "--system", "nobody")[0] == 0
    assert owners(roots / "units") == {} and not list((roots / "home").rglob("*.toml"))


def test_root_may_have_more_groups_than_can_be_set(roots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, which tells all groups and sets sixteen."""

    def refuse(groups: list[int]) -> None:
        raise ValueError("too many groups")

    monkeypatch.setattr(os, "getgroups", lambda: list(range(20)))
    monkeypatch.setattr(os, "setgroups", refuse)
    assert service("install", "demo", "--system", "nobody")[0] == 0


@pytest.mark.parametrize("link", [".config", ".config/vllm-mlx", ".local", ".local/state/vllm-mlx"])
def test_a_link_in_a_home_leads_root_nowhere(roots: Path, link: str) -> None:
    path = roots / "home" / link
    path.parent.mkdir(parents=True, exist_ok=True)
    for made in (path.parent, *path.parent.parents):
        if made.is_relative_to(roots / "home"):
            os.chown(made, pwd.getpwnam("nobody").pw_uid, -1)
    path.symlink_to(roots / "victim")
    before, code_and_text = files_below(roots), service("install", "demo", "--system", "nobody")
    assert code_and_text[0] == 1 and code_and_text[1].endswith("cannot be written: Permission denied.")
    assert files_below(roots) == before and set(owners(roots / "victim").values()) == {0}
    assert (roots / "victim").stat().st_uid == 0


@pytest.mark.parametrize(
    ("called", "stays"),
    [
        ("/opt/homebrew/Cellar/vllm-mlx/0.9/bin/vllm-mlx", "/opt/homebrew/opt/vllm-mlx/bin/vllm-mlx"),
        ("/Users/me/.local/bin/vllm-mlx", "/Users/me/.local/bin/vllm-mlx"),
    ],
)
def test_the_path_of_the_program_survives_an_upgrade(called: str, stays: str) -> None:
    assert program_path(called) == Path(stays)


def test_an_install_that_fails_half_way_leaves_the_first(roots: Path) -> None:
    """The last of the folders has become a link since then."""
    assert service("install", "demo", "--system", "nobody", "--port", "8123")[0] == 0
    folder = roots / "home" / ".local" / "state" / "vllm-mlx"
    folder.rename(roots / "home" / "moved")
    folder.symlink_to(roots / "victim")
    before = files_below(roots)
    code, text = service("install", "demo", "--system", "nobody", "--port", "8124")
    assert code == 1 and "cannot be written" in text
    assert files_below(roots) == before
