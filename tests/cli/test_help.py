"""Help and completion as a terminal of 80 columns shows them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.golden.commands import commands
from tests.project.sources import ROOT
from tests.server.fakes import FakeEngine
from tests.support.commands import call, refusal
from tests.support.running import serving
from vllm_mlx.cli.help import hints
from vllm_mlx.cli.main import make_app
from vllm_mlx.cli.models import EXAMPLE, fitting
from vllm_mlx.cli.settings import COMMON, PANELS, flag_name

_NAMES = [name for name, _ in commands()]
_CALLS = [[*name.split()[1:], "--help"] for name in _NAMES]
_CALLS += [["serve", "--help-all"], ["service", "install", "--help-all"]]


@pytest.mark.parametrize("call", _CALLS, ids=" ".join)
def test_every_help_fits_80_columns_and_cuts_nothing(call: list[str]) -> None:
    result = CliRunner().invoke(make_app(), call, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    text = result.output.replace("`…/mcp`", "").partition("\n")[2]  # below the usage, whose dots mean several words
    assert "…" not in text and "..." not in text
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_help_of_serve_begins_with_the_common_settings_and_names_the_rest() -> None:
    text = call("serve", "--help", COLUMNS="80").stdout
    shown = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
    assert shown == {*map(flag_name, COMMON), "--config", "--help-all"}
    assert text.index("Common settings:") < text.index("Options:") and len(text.splitlines()) < 100
    assert "  --port INTEGER\n      Port to listen on; 0 takes a free one. Default: 8000.\n" in text
    every = call("serve", "--help-all", COLUMNS="80").stdout
    assert all(f"\n{panel}:\n" in every for panel in PANELS if panel != "Model") and "--snapshot-every" in every


COMPLETED = [
    ("serve --snap", "--snapshot-every"),
    ("launch cl", "claude cline"),
    ("serve org/", "org/here org/other"),
    ("models rm org/h", "org/here"),
    ("launch codex --model org/t", "org/tiny"),
    ("chat --model org/", "org/tiny org/here org/other"),
    ("models load ", "org/tiny"),
]


@pytest.mark.parametrize(("words", "expected"), COMPLETED)
def test_a_shell_completes_commands_flags_clients_and_models(words: str, expected: str, tmp_path: Path) -> None:
    """The script that `--install-completion` writes calls the program with these variables."""
    for name in ("here", "other"):
        folder = tmp_path / f"models--org--{name}" / "snapshots" / "0"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    with serving(FakeEngine(), served_model_names=("org/tiny",)) as server:
        variables = {"HF_HUB_CACHE": str(tmp_path), "VLLM_MLX_PORT": server.url.rpartition(":")[2]}
        variables |= {"_VLLM_MLX_COMPLETE": "complete_bash", "COMP_WORDS": f"vllm-mlx {words}"}
        shown = completion(tmp_path, COMP_CWORD=str(words.count(" ") + 1), **variables)
    assert shown.split() == expected.split()


def test_no_server_completes_to_nothing_and_no_error(tmp_path: Path) -> None:
    variables = {"_VLLM_MLX_COMPLETE": "complete_bash", "COMP_WORDS": "vllm-mlx chat --model x", "COMP_CWORD": "3"}
    assert completion(tmp_path, VLLM_MLX_PORT="9", **variables).strip() == ""


def test_the_script_of_a_shell_is_printed(tmp_path: Path) -> None:
    shown = completion(tmp_path, "--show-completion", "bash")
    assert "complete" in shown and "vllm-mlx" in shown


def completion(home: Path, *arguments: str, **variables: str) -> str:
    own = {"HOME": str(home), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [str(Path(sys.executable).with_name("vllm-mlx")), *arguments]
    result = subprocess.run(command, env={**os.environ, **own, **variables}, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout


def test_words_of_other_programs_have_a_hint_that_names_a_command() -> None:
    known = {name.removeprefix("vllm-mlx").strip() for name in _NAMES}
    for words, hint in hints().items():
        assert words not in known, "a command is no word of another program"
        line = refusal(*words.split(), "a", code=2)
        assert line == f"vllm-mlx: `vllm-mlx {words}` is not a command. {hint}"
        for command in re.findall(r"`vllm-mlx ([^`]*)`", hint):
            assert command.startswith("--") or any(f"{command} ".startswith(f"{name} ") for name in known if name)
    usual = "run ps list ls pull rm stop show start download load unload search generate server get create logs"
    assert set(usual.split()) <= hints().keys()
    assert "No such command 'sing'" in call("sing").stderr


@pytest.mark.parametrize("command", [[], ["serve"]])
def test_the_help_ends_with_three_examples(command: list[str]) -> None:
    *_, heading, one, two, three = call(*command, "--help", COLUMNS="80").stdout.splitlines()
    assert heading == "  Examples:"
    names = {name.split()[-1] for name in _NAMES}
    for line in (one, two, three):
        program, name, *_ = shlex.split(line)
        assert program == "vllm-mlx" and name in names
    assert EXAMPLE in one and fitting(10_300_000_000)[0].name == EXAMPLE, "the model for a Mac with 16 GB"


def test_flags_of_other_servers_have_a_hint_that_names_a_flag() -> None:
    shown = call("serve", "--help-all", COLUMNS="80").stdout
    known = {*re.findall(r"^  (--[\w-]+)", shown, re.MULTILINE), "--no-prefix-cache"}
    page = (ROOT / "docs/from-vllm.md").read_text(encoding="utf-8")
    for flag, hint in hints("flags.toml").items():
        assert flag not in known and f"`{flag}`" in page, flag
        assert set(re.findall(r"`(--[\w-]+)", hint)) <= known, hint
    for arguments in (["--gpu-memory-utilization", "0.9"], ["demo", "--gpu-memory-utilization=0.9"]):
        line = refusal("serve", *arguments, code=2)
        assert "has no flag `--gpu-memory-utilization`. Use `--memory-budget" in line


@pytest.mark.parametrize("words", ["chat hi", "status", "bench", "launch claude", "models load", "cache memory"])
def test_an_address_is_given_by_url_to_commands_that_ask_a_server(words: str) -> None:
    for flag in (["--port", "9000"], ["--host=localhost"]):
        line = refusal(*words.split(), *flag, code=2)
        told = " ".join(word for word in words.split() if word not in ("hi", "claude"))
        assert line.endswith(f"`vllm-mlx {told}` has no flag `{flag[0][:6]}`. Use `--url http://127.0.0.1:PORT`.")


def test_a_flag_behind_two_dashes_is_the_clients() -> None:
    assert "No server answers" in refusal("launch", "claude", "--url", "http://127.0.0.1:9", "--", "--port", "1")
