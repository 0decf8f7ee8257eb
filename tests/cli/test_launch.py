"""`vllm-mlx launch`: what each client is told, word by word; a client that is started; files that are kept."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.fakes import FakeEngine
from tests.support.commands import refusal, run
from tests.support.running import serving
from vllm_mlx.cli.client_files import JsonEntries, OwnFile, SettingsChange, TextLines, write_own, write_settings
from vllm_mlx.cli.client_table import CLIENTS
from vllm_mlx.cli.clients import NO_KEY, Plan, Target
from vllm_mlx.cli.launch import is_public, steps
from vllm_mlx.cli.terminal import CommandFailed

GOLDEN = Path(__file__).parent / "launch_golden"
HOME = Path("/home/me")
TARGET = Target(
    url="http://127.0.0.1:8000",
    model="mlx-community/Qwen3-8B-4bit",
    context=40960,
    api_key="it's a key",
    folder=Path("/state"),
    home=HOME,
    is_mac=False,
)


WRITING = [name for name in CLIENTS if CLIENTS[name].plan(TARGET).settings is not None]
STARTED = [name for name in CLIENTS if CLIENTS[name].program]  # the others are editors with settings only
OURS = [name for name in WRITING if isinstance(CLIENTS[name].plan(TARGET).settings, OwnFile)]
KEYLESS = {"codex", "goose", "zed"}  # they read a key from a variable only
THEIRS = {  # settings that users have already, in the format of each client's file
    ".json": '{"theme": "dark", "env": {"EDITOR": "vi"}, "model": {"old": 1}, "provider": {"other": {"npm": "x"}}}',
    ".yml": "# mine\nauto-commits: false",
    ".yaml": "# mine\nauto-commits: false",
}
READERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yml": yaml.safe_load,
    ".yaml": yaml.safe_load,
}


def stand_in(program: Path, code: str) -> None:
    """Makes `program` run Python code. By way of a shell: the interpreter's path can have a space in it."""
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", code])} "$@"\n')
    program.chmod(0o755)


def plan_of(name: str, home: Path = HOME, **other: Any) -> Plan:
    return CLIENTS[name].plan(replace(TARGET, home=home, **other))


def entries_of(name: str, home: Path, **other: Any) -> SettingsChange:
    settings = plan_of(name, home, folder=home / "state", **other).settings
    assert settings is not None
    return settings


@pytest.mark.parametrize("name", CLIENTS)
def test_what_is_printed(name: str) -> None:
    assert plan_of(name).script(plan_of(name).title) == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", STARTED)
def test_what_is_printed_does_the_same_in_a_shell(name: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    plan = plan_of(name, home, folder=tmp_path / "state")
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_in(
        programs / plan.commands[-1][0], "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    )
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), **dict.fromkeys(plan.unset, "set")}
    out = subprocess.run(["bash", "-c", plan.script(name)], env=environment, capture_output=True, text=True, check=True)
    started = [json.loads(line) for line in out.stdout.splitlines()]
    assert [arguments for arguments, _ in started] == [list(command[1:]) for command in plan.runs]
    seen = started[-1][1]
    assert plan.environment.items() <= seen.items()
    assert not set(plan.unset) & seen.keys()
    assert {path: path.read_text() for path in plan.files} == dict(plan.files)
    assert all(path.is_relative_to(tmp_path / "state") for path in plan.files)
    assert all(path.stat().st_mode & 0o077 == 0 for path in plan.files)
    assert not home.exists()


@pytest.mark.parametrize("name", CLIENTS)
def test_a_title_is_one_line_of_comment_whatever_it_holds(name: str) -> None:
    plan = plan_of(name)
    hostile = plan.script("Client with x\ntouch /tmp/owned\r\x1b[2J\u2028at http://a")
    assert hostile.splitlines()[1:] == plan.script("Client").splitlines()[1:]
    assert hostile.startswith("# Client with x touch /tmp/owned")


@pytest.mark.parametrize("name", ["x\ntouch /tmp/owned", "x\x1b[2J", "x\u2028y", "\u202ex"])
def test_a_model_whose_name_is_no_line_of_text_is_refused(name: str) -> None:
    with serving(FakeEngine(), served_model_names=(name,)) as server:
        line = refusal("launch", "claude", "--print", "--url", server.url)
    assert "with a line break or control character in its name" in line


def test_a_key_that_others_can_see_is_said() -> None:
    assert "list of processes" in plan_of("cline").warning
    assert not plan_of("cline", api_key=NO_KEY).warning


@pytest.mark.parametrize(("address", "mode"), [(None, "disabled"), ("http://127.0.0.1:9", "live")])
def test_codex_searches_the_web_if_the_server_does(address: str | None, mode: str) -> None:
    with serving(FakeEngine(), web_search=address) as server:
        result = run("launch", "codex", "--print", "--url", server.url)
    words = shlex.split(result.stdout.splitlines()[-1])
    assert words[words.index(f'web_search="{mode}"') - 1] == "-c"


@pytest.mark.parametrize("model", [TARGET.model, 'My "ł" 🦙'])
def test_settings_of_any_model_are_valid(model: str) -> None:
    codex, cn = plan_of("codex", model=model), plan_of("continue", model=model)
    [command] = codex.commands
    overrides = tomllib.loads("\n".join(command[2::2]))
    assert isinstance(codex.settings, OwnFile) and isinstance(cn.settings, OwnFile)
    assert tomllib.loads(codex.settings.text) == overrides
    assert (overrides["model"], overrides["model_context_window"]) == (model, 40960)
    assert yaml.safe_load(cn.settings.text)["models"][0]["model"] == model


def fake_client(folder: Path, name: str) -> str:
    """A program of that name that tells how it was started. Returns the PATH on which it lies."""
    stand_in(folder / name, "import os, sys; print(sys.argv[1:], os.environ['ANTHROPIC_MODEL'])")
    return f"{folder}:{os.environ['PATH']}"


def test_the_client_is_started_with_its_arguments_and_nothing_is_written(demo_url: str, tmp_path: Path) -> None:
    path = fake_client(tmp_path, "claude")
    result = run("launch", "claude", "--url", demo_url, "--", "-p", "hello", PATH=path)
    assert (result.returncode, result.stdout) == (0, "['-p', 'hello'] demo\n")
    assert list(Path(os.environ["HOME"]).iterdir()) == []


def test_print_asks_the_server_and_starts_nothing(demo_url: str) -> None:
    result = run("launch", "claude", "--print", "--url", demo_url, "--context", "9000", PATH="/usr/bin:/bin")
    assert result.returncode == 0
    assert f"export ANTHROPIC_BASE_URL={demo_url}\n" in result.stdout
    assert "export CLAUDE_CODE_MAX_CONTEXT_TOKENS=9000\n" in result.stdout


def test_what_cannot_be_started_is_one_sentence(demo_url: str) -> None:
    assert "Install it with `npm install -g @openai/codex`" in refusal(
        "launch", "codex", "--url", demo_url, "--context", "99999", PATH="/nowhere"
    )
    assert "Choose one of claude, codex" in refusal("launch", "emacs", code=2)
    assert "Start one with `vllm-mlx serve MODEL`" in refusal("launch", "claude", "--url", "http://127.0.0.1:9")


def test_cursor_on_this_machine_is_refused_with_the_steps(demo_url: str) -> None:
    result = run("launch", "cursor", "--url", demo_url)
    assert result.returncode == 1
    assert "cloudflared tunnel --url http://127.0.0.1:" in result.stdout
    assert result.stderr.startswith("vllm-mlx: Cursor cannot reach http://127.0.0.1:")
    assert run("launch", "cursor", "--url", demo_url, "--print").returncode == 0


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://a.trycloudflare.com", True),
        ("http://a.trycloudflare.com", False),
        ("https://192.168.1.4:8000", False),
        ("https://127.0.0.1", False),
        ("https://mac.local", False),
        ("https://localhost", False),
        ("https://mac", False),
    ],
)
def test_what_cursor_can_reach(url: str, public: bool) -> None:
    assert is_public(url) is public
    assert ("tunnel --url" in steps(url=url, model="m", has_key=True)) is not public


def test_a_tunnel_without_a_key_is_not_enough() -> None:
    text = steps(url="https://a.example.com", model="m", has_key=False)
    assert "VLLM_MLX_API_KEY" in text
    assert "--allowed-host YOUR-TUNNEL" in text  # the server answers to no name that it was not told


def test_writing_keeps_what_is_there_and_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"theme": "dark", "env": {"EDITOR": "vi"}}')
    write_settings(JsonEntries(file, {"env": {"A": "1"}}))
    write_settings(JsonEntries(file, {"env": {"A": "2"}}))
    assert json.loads(file.read_text()) == {"theme": "dark", "env": {"EDITOR": "vi", "A": "2"}}
    assert (tmp_path / "settings.json.before-vllm-mlx").read_text() == '{"theme": "dark", "env": {"EDITOR": "vi"}}'


@pytest.mark.parametrize("name", WRITING)
def test_what_is_written_where_nothing_was(name: str, tmp_path: Path) -> None:
    entries = entries_of(name, tmp_path)
    assert write_settings(entries) == f"Wrote {entries.path}."
    [written] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written == entries.path and written.stat().st_mode & 0o077 == 0
    golden = GOLDEN / f"{name}{written.suffix}"
    assert written.read_text() == golden.read_text()
    assert TARGET.api_key in json.dumps(READERS[written.suffix](written.read_text())) or name in KEYLESS


@pytest.mark.parametrize("name", [name for name in WRITING if name not in OURS])
def test_writing_again_changes_what_is_ours_alone(name: str, tmp_path: Path) -> None:
    entries = entries_of(name, tmp_path)
    path, read = entries.path, READERS[entries.path.suffix]
    path.parent.mkdir(parents=True, exist_ok=True)
    held = "[]" if name == "vscode" else THEIRS[path.suffix]
    path.write_text(held)
    write_settings(entries)
    first = path.read_text()
    assert write_settings(entries_of(name, tmp_path)) == f"{path} needs no change."
    assert path.read_text() == first
    write_settings(entries_of(name, tmp_path, url="http://127.0.0.1:9000"))
    assert read(path.read_text()) == read(first.replace(TARGET.url, "http://127.0.0.1:9000"))
    backup = path.with_name(path.name + ".before-vllm-mlx")
    assert backup.read_text() == held
    assert sorted(path.parent.iterdir()) == sorted([path, backup])
    theirs, now = read(held), read(first)
    if isinstance(theirs, list):
        return
    assert theirs.keys() <= now.keys()
    assert all(now[key] == value for key, value in theirs.items() if not isinstance(value, dict) and key != "model")


def test_a_file_of_our_own_is_replaced_and_nobody_else_s_is(tmp_path: Path) -> None:
    file = entries_of("codex", tmp_path).path
    for url in ("http://127.0.0.1:9000", "http://127.0.0.1:9001"):
        write_settings(entries_of("codex", tmp_path, url=url))
        assert tomllib.loads(file.read_text())["model_providers"]["vllm-mlx"]["base_url"] == f"{url}/v1"
    assert list(file.parent.iterdir()) == [file]
    file.write_text('model = "theirs"\n')
    with pytest.raises(CommandFailed, match="left alone"):
        write_settings(entries_of("codex", tmp_path))
    assert file.read_text() == 'model = "theirs"\n'


def test_a_file_that_is_a_link_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "dotfiles.json", tmp_path / "settings.json"
    real.write_text("{}")
    link.symlink_to(real)
    write_settings(JsonEntries(link, {"a": 1}))
    assert link.is_symlink() and json.loads(real.read_text()) == {"a": 1}


def test_models_of_other_providers_stay(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"models": [{"id": "a", "n": 1}, {"id": "b"}], "words": ["x"]}')
    write_settings(JsonEntries(file, {"models": [{"id": "a", "n": 2}], "words": ["y"]}))
    assert json.loads(file.read_text()) == {"models": [{"id": "a", "n": 2}, {"id": "b"}], "words": ["y", "x"]}


def test_what_cannot_be_merged_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"a": 1, // why\n}')
    with pytest.raises(CommandFailed, match="left alone"):
        write_settings(JsonEntries(file, {"b": 2}))
    assert file.read_text() == '{"a": 1, // why\n}'
    lines = TextLines(tmp_path / "config.toml", "[a]", "[a]\nb = 1\n")
    for theirs in ("[a]\nb = 2\n", "# vllm-mlx launch: begin\nb = 2\n"):
        lines.path.write_text(theirs)
        with pytest.raises(CommandFailed, match="left alone"):
            write_settings(lines)
        assert lines.path.read_text() == theirs


def test_providers_of_other_names_stay_in_a_list(tmp_path: Path) -> None:
    entries = entries_of("vscode", tmp_path)
    other = {"name": "other", "vendor": "ollama"}
    write_own(entries.path, json.dumps([other, {"name": "vllm-mlx", "models": []}]))
    write_settings(entries)
    ours, kept = json.loads(entries.path.read_text())
    assert kept == other and ours["models"][0]["id"] == TARGET.model


def test_an_editor_is_not_started(demo_url: str) -> None:
    assert [name for name in CLIENTS if name not in STARTED] == ["roo", "vscode", "zed"]
    assert "Zed takes its models from its own settings only: --write" in refusal("launch", "zed", "--url", demo_url)


def test_what_a_client_does_without_arguments_gives_way_to_the_user_s(demo_url: str, tmp_path: Path) -> None:
    stand_in(tmp_path / "goose", "import os, sys; print(sys.argv[1:], os.environ['OPENAI_HOST'])")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert plan_of("goose").runs == (("goose", "session"),)
    asked = run("launch", "goose", "--url", demo_url, "--", "run", "-t", "hi", PATH=path)
    assert asked.stdout == f"['run', '-t', 'hi'] {demo_url}\n"


def test_a_context_that_is_too_short_for_a_client_is_said(demo_url: str, tmp_path: Path) -> None:
    stand_in(tmp_path / "hermes", "print('started')")
    result = run("launch", "hermes", "--url", demo_url, "--context", "40960", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.stdout == "started\n"
    assert "Hermes needs a context of at least 64,000 tokens, and this one has 40,960" in result.stderr


def test_write_is_what_writes(demo_url: str) -> None:
    result = run("launch", "claude", "--write", "--url", demo_url)
    file = Path(os.environ["HOME"]) / ".claude" / "settings.json"
    assert result.stdout == f"Wrote {file}.\n"
    assert json.loads(file.read_text())["env"]["ANTHROPIC_MODEL"] == "demo"
    assert file.stat().st_mode & 0o077 == 0
