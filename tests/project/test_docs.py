"""Docs are current, and what they name exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import Command
from typer.main import get_command

from scripts.generate_docs import PAGES, plot, render
from tests.project.sources import ROOT
from vllm_mlx.cli.clients import CLIENTS, Target
from vllm_mlx.cli.help import hints
from vllm_mlx.cli.main import make_app
from vllm_mlx.cli.remote import Model
from vllm_mlx.cli.settings import POSITIONAL, env_name, flag_name, settings_fields
from vllm_mlx.core.errors import setting

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS = [name for name, _, _ in settings_fields()]
APP = make_app()
COMMANDS = {name: command for name, command in get_command(APP).commands.items() if name != "serve"}  # type: ignore[attr-defined]
COMMANDS_FLAGS = {
    flag
    for command in (
        *COMMANDS.values(),
        *COMMANDS["models"].commands.values(),
        *COMMANDS["cache"].commands.values(),
        *(
            command for name, command in COMMANDS["service"].commands.items() if name != "install"
        ),  # it has all settings
    )
    for parameter in command.params
    if parameter.param_type_name == "option"
    for flag in (*parameter.opts, *parameter.secondary_opts)
}
FLAGS = (
    COMMANDS_FLAGS
    | {flag_name(name) for name in SETTINGS if name not in POSITIONAL}
    | {"--config", "--help", "--help-all", "--install-completion", "--version"}
)
# The tools' flags, and what the tools tell git, npm and uv: whatever a file in scripts/ spells.
TOOLS_FLAGS = {
    flag
    for file in (ROOT / "scripts").rglob("*")
    if file.is_file() and file.suffix in ("", ".py", ".sh")
    for flag in re.findall(r"--[a-z][a-z-]+", file.read_text(encoding="utf-8"))
}
CLIENTS_FLAGS = {
    "--allowed-tools", "--allow-all-tools", "--attachment", "--auth-type", "--auto", "--bare", "--cask", "--config",
    "--continue", "--data-dir", "--editor-model", "--extension", "--file", "--image", "--install-extension", "--last",
    "--local", "--message", "--model-metadata-file", "--no-show-model-warnings", "--permission-mode", "--profile",
    "--provider", "--settings", "--tools", "--weak-model", "--yolo",
}  # fmt: skip

ROUTER_FLAGS = {
    "--balance-abs-threshold", "--balance-rel-threshold", "--health-check-interval-secs",
    "--max-buffered-request-bytes", "--policy", "--prometheus-host", "--routing-key-headers", "--sticky-sessions",
    "--tenant-api-key", "--worker-overload-token-usage", "--worker-overload-waiting-requests", "--worker-urls",
}  # fmt: skip


def test_every_command_and_its_flags_are_documented() -> None:
    page = read(ROOT / "docs" / "cli.md")
    assert [name for name in COMMANDS if f"## {name}\n" not in page] == []
    spelled = {flag for flag in COMMANDS_FLAGS if flag.startswith("--")} - {"--help", "--history"}
    assert [flag for flag in sorted(spelled) if f"{flag}" not in page] == []


def flags_of(command: Command) -> set[str]:
    """Those of its subcommands too."""
    own = {
        flag
        for each in command.params
        if each.param_type_name == "option"
        for flag in (*each.opts, *each.secondary_opts)
    }
    return own.union(*(flags_of(each) for each in getattr(command, "commands", {}).values()))


def commands_in(text: str) -> Iterator[tuple[str, list[str]]]:
    """The name of each command of ours in code, and the flags given to it; what follows `--` is another's."""
    for code in re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL):
        for line in "".join(code).replace("\\\n", " ").splitlines():
            for name, rest in re.findall(r"(?:^|[ /(])vllm-mlx ([a-z]+)((?: [^|#;&]*)?)", line):
                yield name, re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest.partition(" -- ")[0])


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_in_code_exist_and_have_their_flags(path: Path) -> None:
    every = get_command(APP).commands  # type: ignore[attr-defined]
    text = read(path).replace("scripts/serve", "vllm-mlx serve")
    wrong = [
        (name, flag)
        for name, flags in commands_in(text)
        for flag in ({f"no command {name}"} if name not in every else set(flags) - flags_of(every[name]) - {"--help"})
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.install])
def test_the_pages_hold_what_launch_configures(name: str) -> None:
    target = Target(
        url="http://127.0.0.1:8000",
        model=Model("mlx-community/Qwen3.5-9B-MLX-4bit", 40960, searches=False),
        context=40960,
        api_key="none",
        folder=Path("/state"),
    )
    client = CLIENTS[name].for_server(target)
    script = client.script(client.title)
    page = read(ROOT / "docs" / "clients" / f"{name}.md")
    section = page.partition("\n## What `launch` configures\n")[2].partition("\n## ")[0]
    example = re.findall(r"```(?:bash|toml)\n(.*?)```", section, re.DOTALL)
    start = f"vllm-mlx launch {name}" + ("" if client.program else " --print")
    assert page.startswith(f"# {client.title}\n") and f"\n{client.install}\n{start}\n" in page
    assigned = {word.partition("=")[0] for code in example for word in re.findall(r"\b[A-Z_]{6,}=\S+", code)}
    told = set(re.findall(r"(?:export|unset) ([A-Z_]+)", script))
    if name not in ("opencode", "kilo"):  # their variable holds what the example has as a file
        assert told <= assigned | set(re.findall(r"[A-Z_]{6,}", section))
    assert assigned <= told
    values = re.findall(r"\b\d{4,}\b", "".join(example))
    assert [value for value in values if value not in script] == []


def messages() -> Iterator[str]:
    """The texts in the code, with `…` for what is put into them."""
    for file in (ROOT / "vllm_mlx").rglob("*.py"):
        for node in ast.walk(ast.parse(read(file))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(map(_text_of, node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _text_of(part: ast.expr) -> str:
    match part:
        case ast.Constant(value):
            return str(value)
        case ast.FormattedValue(ast.Call(ast.Name("setting"), [ast.Constant(str(name))])):
            return setting(name)
        case _:
            return "…"


def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = re.findall(r"^> (.+)$", read(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE)
    known = list(messages())
    assert len(quoted) > 20
    assert [quote for quote in quoted if not any(quote in message for message in known)] == []


def anchor(heading: str) -> str:
    """GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_the_generated_tables_are_current(name: str) -> None:
    page = read(ROOT / "docs" / name)
    assert render(page) == page, "run scripts/generate_docs.py"


def test_the_plot_shows_the_table_of_the_benchmarks() -> None:
    page = read(ROOT / "docs" / "benchmarks.md")
    assert read(ROOT / "docs" / "benchmarks.svg") == plot(page), "run scripts/generate_docs.py"
    ratios = re.findall(r"\| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(ratios) > 5 and all(f">{ratio}</text>" in plot(page) for ratio in ratios)


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


@pytest.mark.parametrize(
    "path", [path for path in DOCS if path.name != "benchmarks-developers.md"], ids=lambda path: path.name
)
def test_named_settings_exist(path: Path) -> None:
    served = [line for line in read(path).splitlines() if ".venv/bin/" not in line and "git clone" not in line]
    flags = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", "\n".join(served)))
    opposites = {flag for flag in flags if flag.startswith("--no-") and "--" + flag.removeprefix("--no-") in FLAGS}
    theirs = CLIENTS_FLAGS if path.parent.name == "clients" else set()
    theirs |= ROUTER_FLAGS if path.name == "scaling.md" else set()
    theirs |= hints("flags.toml").keys() if path.name == "from-vllm.md" else set()
    assert flags - opposites <= FLAGS | TOOLS_FLAGS | theirs
    variables = set(re.findall(r"VLLM_MLX_[A-Z_]+\w", read(path)))
    own = {"VLLM_MLX_CONFIG", "VLLM_MLX_PYTHON", "VLLM_MLX_FORCE_ATTENTION"}
    assert variables <= {env_name(name) for name in SETTINGS} | own
