"""scripts/accept-clients: one client after the other, whatever each of them does. The clients here are stand-ins."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts._accept_clients.__main__ import parse_arguments, run_clients
from scripts._accept_clients.clients import CLIENTS, NOT_RUN, Client
from scripts._accept_clients.install import binary, run_program
from scripts._accept_clients.session import SCRIPTED_COMMANDS
from tests.support.commands import stand_in
from tests.support.running import serving
from vllm_mlx.cli.clients import CLIENTS as LAUNCHED

from .fakes import FakeEngine
from .scripted import ScriptedAgent

AGENT = """
import json, os, subprocess, sys, urllib.request
messages, tool = [{"role": "user", "content": sys.argv[-1]}], {"type": "function", "function": {"name": "shell"}}
while True:
    body = json.dumps({"model": os.environ["GOOSE_MODEL"], "messages": messages, "tools": [tool]}).encode()
    address = os.environ["OPENAI_HOST"] + "/v1/chat/completions"
    request = urllib.request.Request(address, body, {"content-type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
"""

FORGETFUL = AGENT.replace("text=True).stdout", "text=True).stdout[:0]")


def client_of(launched: str) -> Client:
    return next(client for client in CLIENTS if client.launched == launched)


def install(launched: str, folder: Path, code: str) -> None:
    """A client that looks installed, and runs this code."""
    client = client_of(launched)
    package = folder / "node_modules" / client.package / "package.json"
    package.parent.mkdir(parents=True)
    package.write_text(json.dumps({"version": client.version}))
    stand_in(binary(client, folder), code)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that plays the script, on a machine without npm."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "cat", "sleep"):
        (programs / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(programs))
    with serving(FakeEngine(play=ScriptedAgent(*SCRIPTED_COMMANDS).play)) as server:
        yield server.url


def accepts(url: str, folder: Path, *launched: str) -> bool:
    names = (word for name in launched for word in ("--client", name))
    return run_clients(
        parse_arguments(["--url", url, "--scripted", "--limit-s", "120", "--folder", str(folder), *names])
    )


def rows(table: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    return {first: rest for first, *rest in cells}


def test_a_client_that_fails_does_not_end_the_run(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("qwen", tmp_path, "import sys; sys.exit('no such model')")
    install("cline", tmp_path, "")
    binary(client_of("cline"), tmp_path).write_text("#!/nowhere\n")  # it is there, and cannot be started
    install("goose", tmp_path, AGENT)
    assert not accepts(url, tmp_path, "qwen", "cline", "pi", "goose")
    told = capsys.readouterr()
    table = rows(told.out)
    assert table["Qwen Code"][-1] == "no: it ended with code 1; it sent no request"
    assert table["Cline"][-1] == "no: it ended with code 127; it sent no request"
    assert table["pi"][-1] == "not run: it cannot be installed. npm was not found: install Node.js."
    assert table["goose"][1:4] == ["3", "", "2, the right ones"] and table["goose"][-1] == "yes"
    assert "no such model" in told.err and "It did not start: " in told.err


def test_a_run_is_accepted_if_all_its_clients_are(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("goose", tmp_path, AGENT)
    assert accepts(url, tmp_path, "goose")
    assert "goose" in rows(capsys.readouterr().out)
    stand_in(binary(client_of("goose"), tmp_path), FORGETFUL)
    assert not accepts(url, tmp_path, "goose")
    assert "of 2 commands, 2 ran, and not every output came back" in rows(capsys.readouterr().out)["goose"][-1]


HASTY = AGENT.replace("text=True).stdout", 'text=True).stdout if "sleep" in command else ""')


@pytest.mark.parametrize(
    ("launched", "code", "verdict"),
    [
        ("qwen", HASTY, "yes, but it lost the output of the command that ended at once"),
        pytest.param("qwen", AGENT, "yes", marks=pytest.mark.full),
        pytest.param(
            "qwen",
            FORGETFUL,
            "no: of 2 commands, 2 ran, and not every output came back",
            marks=pytest.mark.full,
        ),
        ("goose", HASTY, "no: of 2 commands, 2 ran, and not every output came back"),
    ],
)
def test_the_output_of_a_command_that_ends_at_once_is_lost_by_clients_known_for_it_alone(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], launched: str, code: str, verdict: str
) -> None:
    if launched == "qwen":
        code = code.replace("GOOSE_MODEL", "OPENAI_MODEL").replace("OPENAI_HOST", "OPENAI_BASE_URL")
        code = code.replace("/v1/chat", "/chat")
    install(launched, tmp_path, code)
    assert accepts(url, tmp_path, launched) == verdict.startswith("yes")
    assert rows(capsys.readouterr().out)[client_of(launched).name][-1] == verdict


def test_every_client_of_the_table_is_run_or_has_a_reason() -> None:
    run = {client.launched for client in CLIENTS}
    assert run | set(NOT_RUN) == set(LAUNCHED) and not run & set(NOT_RUN)


def test_a_program_ends_although_what_it_started_goes_on(tmp_path: Path) -> None:
    """The helper is in a session of its own, and holds the output open."""
    code = "import subprocess; p = subprocess.Popen(['sleep', '30'], start_new_session=True); print(p.pid, flush=True)"
    exit_code, output = run_program([sys.executable, "-c", code], limit_s=20)
    assert exit_code == 0, "it was waited for until the limit"
    subprocess.run(["kill", output.strip()], check=True)


def test_a_program_that_does_not_end_is_ended() -> None:
    assert run_program(["sh", "-c", "echo begun; exec sleep 60"], limit_s=1) == (None, "begun\n")


WITH_TITLE = """
import json, os, urllib.request
def ask(model, **fields):
    body = {"model": os.environ[model], "max_tokens": 8, **fields}
    address = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    urllib.request.urlopen(request).read()
say = {"role": "user", "content": "Say: hello"}
ask("ANTHROPIC_DEFAULT_HAIKU_MODEL", messages=[say])
call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "cat note"}}
result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": open("note").read()}
messages = [say, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
ask("ANTHROPIC_MODEL", messages=messages, tools=[{"name": "Bash", "input_schema": {"type": "object"}}])
"""


@pytest.mark.full
def test_replies_of_a_small_model_beside_the_main_one_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: Callable[..., Path]
) -> None:
    install("claude", tmp_path, WITH_TITLE)
    main, small = checkpoint("qwen3", hidden_size=192), checkpoint("qwen3")
    arguments = ["--client", "claude", "--folder", str(tmp_path), "--model", str(main), "--small", str(small)]
    assert run_clients(parse_arguments(arguments)), capsys.readouterr()
    assert rows(capsys.readouterr().out)["Claude Code"][1:4] == ["2", "main 1, small 1", "1, the right ones"]
