"""Docs are current, and what they name exists."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from scripts.generate_docs import PAGES, render
from tests.project.sources import ROOT
from vllm_mlx.cli.main import app
from vllm_mlx.cli.settings import POSITIONAL, env_name, flag_name, settings_fields

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = [name for name, _, _ in settings_fields()]
COMMANDS = {name: command for name, command in get_command(app).commands.items() if name != "serve"}  # type: ignore[attr-defined]
COMMANDS_FLAGS = {
    flag
    for command in (*COMMANDS.values(), *COMMANDS["models"].commands.values())
    for parameter in command.params
    if parameter.param_type_name == "option"
    for flag in (*parameter.opts, *parameter.secondary_opts)
}
FLAGS = (
    COMMANDS_FLAGS
    | {flag_name(name) for name in SETTINGS if name not in POSITIONAL}
    | {"--config", "--help", "--version"}
)
OTHERS_FLAGS = {
    "--out",
    "--freeze",
    "--score",
    "--per-skill",
    "--minutes",
    "--seed",
    "--static",
    "--full",
    "--depth",
    "--scripted",
    "--url",
    "--faults",
    "--trim",
}  # of other scripts and of git
CLIENTS_FLAGS = {"--tools", "--auth-type", "--openai-base-url", "--openai-api-key", "--model", "--weak-model"}


def test_every_command_and_its_flags_are_documented() -> None:
    page = read(ROOT / "docs" / "cli.md")
    assert [name for name in COMMANDS if f"## {name}\n" not in page] == []
    spelled = {flag for flag in COMMANDS_FLAGS if flag.startswith("--")} - {"--help", "--history"}
    assert [flag for flag in sorted(spelled) if f"{flag}" not in page] == []


def anchor(heading: str) -> str:
    """GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_the_generated_tables_are_current(name: str) -> None:
    page = read(ROOT / "docs" / name)
    assert render(page) == page, "run scripts/generate_docs.py"


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_documented(name: str) -> None:
    page = read(ROOT / "docs" / "configuration.md")
    assert f"| `{name.upper() if name in POSITIONAL else flag_name(name)}` |" in page


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings_of_this_repository(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", read(path)):
        if re.match(r"https?://", target):
            continue
        file, _, fragment = target.partition("#")
        linked = (path.parent / file) if file else path
        assert linked.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", read(linked), re.MULTILINE)
            assert fragment in {anchor(heading) for heading in headings}, target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_named_files_and_scripts_exist(path: Path) -> None:
    named = re.findall(r"(?<![\w/.~-])((?:scripts|docs|tests|vllm_mlx|\.ci)/[\w./-]*\w)", read(path))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", [path for path in DOCS if path.name != "benchmarks.md"], ids=lambda path: path.name)
def test_named_settings_exist(path: Path) -> None:
    served = [line for line in read(path).splitlines() if ".venv/bin/" not in line and "git clone" not in line]
    flags = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", "\n".join(served)))
    opposites = {flag for flag in flags if flag.startswith("--no-") and "--" + flag.removeprefix("--no-") in FLAGS}
    theirs = CLIENTS_FLAGS if path.name == "clients.md" else set()
    assert flags - opposites <= FLAGS | OTHERS_FLAGS | theirs
    variables = set(re.findall(r"VLLM_MLX_[A-Z_]+\w", read(path)))
    assert variables <= {env_name(name) for name in SETTINGS} | {"VLLM_MLX_CONFIG", "VLLM_MLX_PYTHON"}
