"""`vllm-mlx launch`: what each client is told, word by word; a client that is started; files that are written."""

import json
import os
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.encoding import FakeEncoders
from tests.server.fakes import FakeEngine
from tests.support.commands import call, refusal, run, stand_in
from tests.support.rows import cases
from tests.support.running import serving
from vllm_mlx.cli.clients import CLIENTS, NO_KEY, Client, Target, roles_of
from vllm_mlx.cli.remote import Model

GOLDEN = Path(__file__).parent / "launch_golden"
TARGET = Target(
    url="http://127.0.0.1:8000",
    model=Model("mlx-community/Qwen3-8B-4bit", 40960, searches=False),
    context=40960,
    api_key="it's a key",
    folder=Path("/state"),
)
READERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".yaml": yaml.safe_load,
    ".ts": lambda text: json.loads(text[text.index("{") : text.rindex("}") + 1]),
}
STARTED = [name for name in CLIENTS if CLIENTS[name].program]
EDITORS = ["roo", "vscode", "zed"]  # settings only: they cannot be started
SET_UP = [*STARTED, *EDITORS]
BY_HAND = [name for name in CLIENTS if name not in SET_UP]  # they have a page and no more


def client_of(name: str, model: dict[str, Any] | None = None, **other: Any) -> Client:
    target = replace(TARGET, model=replace(TARGET.model, **(model or {})), **other)
    return CLIENTS[name].for_server(target)


@pytest.mark.parametrize("name", SET_UP)
def test_what_is_printed(name: str) -> None:
    client = client_of(name)
    printed = client.script(client.title) if name in STARTED else "".join(client.files.values())
    assert printed == (GOLDEN / (f"{name}.sh" if name in STARTED else f"{name}.json")).read_text()


@pytest.mark.parametrize("name", cases(STARTED, ["claude", "codex", "aider", "opencode"]))
def test_what_is_printed_does_the_same_in_a_shell(name: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    client = client_of(name, folder=tmp_path / "state")
    programs = tmp_path / "bin"
    stand_in(programs / client.program, "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), **dict.fromkeys(client.unset, "set")}
    out = subprocess.run(
        ["bash", "-c", client.script(name)], env=environment, capture_output=True, text=True, check=True
    )
    started = [json.loads(line) for line in out.stdout.splitlines()]
    assert [arguments for arguments, _ in started] == [command[1:] for command in client.runs()]
    seen = started[-1][1]
    assert client.environment.items() <= seen.items()
    assert not set(client.unset) & seen.keys()
    assert {path: Path(path).read_text() for path in client.files} == client.files
    assert all(Path(path).is_relative_to(tmp_path / "state") for path in client.files)
    assert all(Path(path).stat().st_mode & 0o077 == 0 for path in client.files)
    assert not home.exists()


@pytest.mark.parametrize("name", STARTED)
def test_a_title_is_one_line_of_comment_whatever_it_holds(name: str) -> None:
    client = client_of(name)
    hostile = client.script("Client with x\ntouch /tmp/owned\r\x1b[2J\u2028at http://a")
    assert hostile.splitlines()[1:] == client.script("Client").splitlines()[1:]
    assert hostile.startswith("# Client with x touch /tmp/owned")


@pytest.mark.parametrize("name", ["x\ntouch /tmp/owned", "x\x1b[2J", "x\u2028y", "\u202ex"])
def test_a_model_whose_name_is_no_line_of_text_is_refused(name: str) -> None:
    with serving(FakeEngine(), served_model_names=(name,)) as server:
        line = refusal("launch", "claude", "--print", "--url", server.url)
    assert "with a line break or control character in its name" in line


def test_a_key_that_others_can_see_is_said() -> None:
    assert "list of processes" in client_of("cline").key_warning
    assert not client_of("cline", api_key=NO_KEY).key_warning


@pytest.mark.parametrize(("address", "mode"), [(None, "disabled"), ("http://127.0.0.1:9", "live")])
def test_codex_searches_the_web_if_the_server_does(address: str | None, mode: str) -> None:
    with serving(FakeEngine(), web_search=address) as server:
        result = call("launch", "codex", "--print", "--url", server.url)
    words = shlex.split(result.stdout.splitlines()[-1])
    assert words[words.index(f'web_search="{mode}"') - 1] == "-c"


def documents_of(client: Client) -> list[Any]:
    """Return the files and variables that the client reads."""
    documents = [READERS[Path(path).suffix](text) for path, text in client.files.items()]
    return documents + [json.loads(value) for value in client.environment.values() if value.startswith("{")]


@pytest.mark.parametrize("model", [TARGET.model.name, 'My "ł" 🦙'])
@pytest.mark.parametrize("name", SET_UP)
def test_settings_of_any_model_are_valid(name: str, model: str) -> None:
    client = client_of(name, {"name": model})
    documents = documents_of(client)
    if name == "codex":
        documents.append(tomllib.loads("\n".join(client.flags[1::2])))
    assert all(json.dumps(model)[1:-1] in json.dumps(document) for document in documents)


# Where each client is told what the model takes and does, and the value if it does and if it does not.
_OPENCODE = ("provider", "vllm-mlx", "models", "m")
_PI, _OPENCLAW = ("models", 0), ("models", "providers", "vllm-mlx", "models", 0)
_ROO = ("providerProfiles", "apiConfigs", "vllm-mlx", "openAiCustomModelInfo")
_ZED = ("language_models", "openai_compatible", "vllm-mlx", "available_models", 0, "capabilities")
BOTH = ["text", "image"], ["text"]
TOLD: Any = [
    *[(name, (*_OPENCODE, "attachment"), "images", True, False) for name in ("opencode", "kilo")],
    *[(name, (*_OPENCODE, "modalities", "input"), "images", *BOTH) for name in ("opencode", "kilo")],
    *[(name, (*_OPENCODE, "reasoning"), "reasoning", True, False) for name in ("opencode", "kilo")],
    *[(name, (*_OPENCODE, "tool_call"), "tools", True, False) for name in ("opencode", "kilo")],
    ("qwen", ("modelProviders", "openai", 0, "generationConfig", "modalities", "image"), "images", True, False),
    ("aider", ("openai/m", "supports_vision"), "images", True, False),
    ("pi", (*_PI, "input"), "images", *BOTH),
    ("pi", (*_PI, "reasoning"), "reasoning", True, False),
    ("openclaw", (*_OPENCLAW, "input"), "images", *BOTH),
    ("openclaw", (*_OPENCLAW, "reasoning"), "reasoning", True, False),
    ("continue", ("models", 0, "capabilities"), "images", ["tool_use", "image_input"], ["tool_use"]),
    ("continue", ("models", 0, "capabilities"), "tools", ["tool_use"], []),
    ("roo", (*_ROO, "supportsImages"), "images", True, False),
    ("hermes", ("model", "supports_vision"), "images", True, False),
    ("droid", ("customModels", 0, "noImageSupport"), "images", False, True),
    ("vscode", (0, "models", 0, "vision"), "images", True, False),
    ("vscode", (0, "models", 0, "toolCalling"), "tools", True, False),
    ("zed", (*_ZED, "images"), "images", True, False),
    ("zed", (*_ZED, "tools"), "tools", True, False),
    ("zed", (*_ZED, "parallel_tool_calls"), "tools", True, False),
    ("aichat", ("clients", 0, "models", 0, "supports_vision"), "images", True, False),
    ("aichat", ("clients", 0, "models", 0, "supports_function_calling"), "tools", True, False),
]
UNTOLD = {"claude", "codex", "cline", "goose", "copilot"}  # they have no such setting


def found(client: Client, path: tuple[Any, ...]) -> Any:
    [value] = documents_of(client)
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize(("name", "path", "capability", "yes", "no"), TOLD)
def test_each_client_is_told_what_the_model_does(
    name: str, path: tuple[Any, ...], capability: str, yes: Any, no: Any
) -> None:
    usual = frozenset({"tools", "reasoning"})
    able = client_of(name, {"name": "m", "capabilities": usual | {capability}})
    unable = client_of(name, {"name": "m", "capabilities": usual - {capability}})
    assert (found(able, path), found(unable, path)) == (yes, no)


def test_every_client_is_told_of_images_or_has_no_setting_for_them() -> None:
    assert UNTOLD | {name for name, _, capability, *_ in TOLD if capability == "images"} == set(SET_UP)
    for name in UNTOLD:
        seeing, blind = ({"capabilities": has} for has in (frozenset({"images"}), frozenset()))
        assert client_of(name, seeing) == client_of(name, blind)


@pytest.mark.parametrize(("capabilities", "told"), [(["tools", "images"], ["text", "image"]), ([], ["text"])])
def test_the_server_says_whether_its_model_takes_images(capabilities: list[str], told: list[str]) -> None:
    with serving(FakeEngine(capabilities=capabilities)) as server:
        script = call("launch", "pi", "--print", "--url", server.url).stdout
        entry = json.loads(call("launch", "zed", "--print", "--url", server.url).stdout)
    assert READERS[".ts"]("".join(line for line in script.splitlines() if "registerProvider" in line)) is not None
    assert f'"input": {json.dumps(told)}' in script
    [model] = entry["language_models"]["openai_compatible"]["vllm-mlx"]["available_models"]
    assert model["capabilities"]["images"] is ("images" in capabilities)
    assert model["capabilities"]["tools"] is ("tools" in capabilities)


def test_small_roles_go_to_the_model_beside_the_main_one() -> None:
    small = Model('a "small" one', 8000, searches=False)
    opencode = json.loads(client_of("opencode", small=small).environment["OPENCODE_CONFIG_CONTENT"])
    assert opencode["small_model"] == 'vllm-mlx/a "small" one'
    models = opencode["provider"]["vllm-mlx"]["models"]
    assert models['a "small" one']["limit"] == {"context": 8000, "output": 2000} and len(models) == 2
    seeing = client_of("kilo", {"capabilities": {"images"}}, small=replace(small, capabilities=frozenset()))
    models = json.loads(seeing.environment["KILO_CONFIG_CONTENT"])["provider"]["vllm-mlx"]["models"]
    assert [model["attachment"] for model in models.values()] == [True, False], "each model says its own"
    aider = client_of("aider", small=small)
    assert aider.flags[3] == 'openai/a "small" one'
    [metadata] = [json.loads(text) for text in aider.files.values()]
    assert metadata['openai/a "small" one']["max_input_tokens"] == 6000 and len(metadata) == 2


def fake_client(folder: Path, name: str) -> str:
    """A program of that name that tells how it was started. Returns the PATH on which it lies."""
    stand_in(folder / name, "import os, sys; print(sys.argv[1:], os.environ['ANTHROPIC_MODEL'])")
    return f"{folder}:{os.environ['PATH']}"


def test_the_client_is_started_with_its_arguments_and_nothing_is_written(demo_url: str, tmp_path: Path) -> None:
    path = fake_client(tmp_path, "claude")
    result = run("launch", "claude", "--url", demo_url, "--", "-p", "hello", PATH=path)
    assert (result.returncode, result.stdout) == (0, "['--permission-mode', 'default', '-p', 'hello'] demo\n")
    assert list(Path(os.environ["HOME"]).iterdir()) == []


def test_print_asks_the_server_and_starts_nothing(demo_url: str) -> None:
    result = call("launch", "claude", "--print", "--url", demo_url, "--context", "9000", PATH="/usr/bin:/bin")
    assert result.returncode == 0
    assert f"export ANTHROPIC_BASE_URL={demo_url}\n" in result.stdout
    assert "export CLAUDE_CODE_MAX_CONTEXT_TOKENS=9000\n" in result.stdout


def test_what_cannot_be_started_is_one_sentence(demo_url: str) -> None:
    assert "Install it with `npm install -g @openai/codex`" in refusal(
        "launch", "codex", "--url", demo_url, "--context", "99999", PATH="/nowhere"
    )
    assert "Choose one of claude, codex" in refusal("launch", "emacs", code=2)
    assert "Start one with `vllm-mlx serve MODEL`" in refusal("launch", "claude", "--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    "given", [["--permission-mode", "plan"], ["--permission-mode=plan"], ["--dangerously-skip-permissions"]]
)
def test_claude_code_asks_before_it_acts_unless_the_user_chooses_a_mode(given: list[str]) -> None:
    assert client_of("claude").runs() == [["claude", "--permission-mode", "default"]]
    assert client_of("claude").runs(["-p", "x", *given]) == [["claude", "-p", "x", *given]]


@pytest.mark.parametrize("name", EDITORS)
def test_an_editor_is_not_started_and_its_entry_alone_is_printed(demo_url: str, name: str) -> None:
    title = CLIENTS[name].title
    for url in (demo_url, "http://127.0.0.1:9"):  # no server is asked or started for it
        assert f"launch cannot start {title}" in refusal("launch", name, "--url", url, "--model", "demo")
    printed = call("launch", name, "--print", "--url", demo_url)
    assert "demo" in json.dumps(json.loads(printed.stdout))
    assert f"{title} with demo at {demo_url}" in printed.stderr and CLIENTS[name].next_step[:20] in printed.stderr


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("flags", [[], ["--print"]])
def test_a_client_that_is_set_up_by_hand_is_a_sentence_of_its_page(name: str, flags: list[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "clients" / f"{name}.md"
    said = refusal("launch", name, *flags, "--url", "http://127.0.0.1:9")
    assert CLIENTS[name].next_step in said and f"docs/clients/{name}.md" in said
    assert page.read_text().startswith(f"# {CLIENTS[name].title}")


def test_without_a_client_all_are_listed_and_how_to_install_them(tmp_path: Path) -> None:
    stand_in(tmp_path / "codex", "")
    shown = run("launch", PATH=f"{tmp_path}:/usr/bin:/bin", COLUMNS="80")
    assert shown.returncode == 0 and all(f"  {name} " in shown.stdout for name in CLIENTS)
    rows = {line.split()[0]: line for line in shown.stdout.splitlines() if line.split()}
    assert "installed" in rows["codex"] and "npm install -g opencode-ai" in rows["opencode"]
    assert "Name a client" in refusal("launch", "--print", code=2)


def test_what_a_client_does_without_arguments_gives_way_to_the_user_s(demo_url: str, tmp_path: Path) -> None:
    stand_in(tmp_path / "goose", "import os, sys; print(sys.argv[1:], os.environ['OPENAI_HOST'])")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert client_of("goose").runs() == [["goose", "session"]]
    asked = run("launch", "goose", "--url", demo_url, "--", "run", "-t", "hi", PATH=path)
    assert asked.stdout == f"['run', '-t', 'hi'] {demo_url}\n"


@pytest.mark.full
def test_a_context_that_is_too_short_for_a_client_is_said(demo_url: str, tmp_path: Path) -> None:
    stand_in(tmp_path / "hermes", "print('started')")
    result = run("launch", "hermes", "--url", demo_url, "--context", "40960", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.stdout == "started\n"
    assert "Hermes needs a context of at least 64,000 tokens, and this one has 40,960" in result.stderr


def test_continue_gets_a_model_for_each_of_its_roles() -> None:
    """Continue chooses the template of completions by the model's name, so that a name without a family has no role."""
    engine = FakeEncoders()
    with serving(engine, models=engine.models) as running:
        printed = call("launch", "continue", "--print", "--url", running.url).stdout
        config = printed[printed.index("name:") : printed.index("\nEND")]
    chat, embed, rerank = yaml.safe_load(config)["models"]
    assert (chat["model"], "roles" in chat) == ("coder", False)
    shared = {"apiBase": f"{running.url}/v1", "apiKey": "none"}
    assert embed == {"name": "e5, embed", "provider": "openai", "model": "e5", "roles": ["embed"], **shared}
    assert rerank == {"name": "judge, rerank", "provider": "cohere", "model": "judge", "roles": ["rerank"], **shared}


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (("Qwen2.5-Coder-7B", "e5"), "Qwen2.5-Coder-7B"),
        (("chat", "org/starcoder2-3b"), "org/starcoder2-3b"),
        (("chat", "DeepSeek-Coder-V2-Lite"), "DeepSeek-Coder-V2-Lite"),
        (("qwen3-8b", "deepseek-r1", "qwen3-embedding"), None),
    ],
)
def test_completions_go_to_a_model_that_its_name_describes(names: tuple[str, ...], model: str | None) -> None:
    tasks = {"task": "chat"}, {"task": "embedding" if "e5" in names else "chat"}, {"task": "embedding"}
    models = [Model.of({"id": name, **task}) for name, task in zip(names, tasks, strict=False)]
    assert roles_of(models).get(("autocomplete", "openai")) == model


def test_a_server_with_an_embedder_first_starts_the_client_on_its_chat_model() -> None:
    engine = FakeEncoders(names=("e5", "coder"))
    with serving(engine, models=engine.models) as running:
        assert "coder at" in call("launch", "continue", "--print", "--url", running.url).stdout
