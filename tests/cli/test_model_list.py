"""`[[models]]` in the file, and NAME=MODEL on the command line."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.commands import call, served
from tests.support.commands import refusal as refusal_of
from vllm_mlx.cli.options import load_settings, read_models
from vllm_mlx.core.errors import ConfigError

LIST = """
port = 1234
[[models]]
model = "demo"
name = "coder"
aliases = ["gpt-5"]
match = ["claude-*"]
max-model-len = 4096
temperature = 0.5
pin = true
[[models]]
model = "org/small"
text_only = true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(LIST)
    return path


def refusal(path: Path, **flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, path).catalogue()
    return caught.value.message


def test_each_table_describes_its_own_model(file: Path) -> None:
    settings = load_settings({"max_num_seqs": 3}, file)
    coder, small = settings.catalogue().entries
    assert (coder.names, coder.patterns, coder.pin) == (("coder", "gpt-5"), ("claude-*",), True)
    assert (coder.config.model, coder.config.max_model_len, coder.config.defaults.temperature) == ("demo", 4096, 0.5)
    assert (small.names, small.patterns, small.pin) == (("org/small",), (), False)
    assert small.config.text_only and small.config.max_model_len is None and small.config.defaults.temperature is None
    assert [one.engine_config().max_num_seqs for one in settings.each()] == [3, 3]
    assert settings.model == "demo" and settings.port == 1234, "settings outside are the process's, or the first's"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[models]]\nname = 'a'\n", "`model` in table 1 of `[[models]]` in FILE is missing."),
        ("[[models]]\nmodel = ''\n", "`model` in table 1 of `[[models]]` in FILE: it is empty"),
        ("[[models]]\nmodel = 'a'\nmax_model_len = 1\n", "`max_model_len` in table 1 of `[[models]]` in FILE must be"),
        (
            "[[models]]\nmodel = 'a'\nport = 1\n",
            "`port` in table 1 of `[[models]]` in FILE is not a setting of a model. Write it above the tables",
        ),
        (
            "[[models]]\nmodel = 'a'\nserved-model-name = 'b'\n",
            "`served_model_name` in table 1 of `[[models]]` in FILE is not a setting of a model. Write `name` and "
            "`aliases` instead.",
        ),
        (
            "served_model_name = 'b'\n[[models]]\nmodel = 'a'\n",
            "Leave one of the two out, or write `name` and `aliases` in the table of its model.",
        ),
        (
            "[[models]]\nmodel = 'a'\npin = 'yes'\n",
            "`pin` in table 1 of `[[models]]` in FILE must be true or false, got 'yes'.",
        ),
        ("[[models]]\nmodel = 'a'\nmax_model_ln = 1\n", "not a setting of a model. Did you mean `max_model_len`?"),
        (
            "models = 3\n",
            "`models` in FILE must be a list of tables. Write `[[models]]` above the settings of each model.",
        ),
        ("[models]\nmodel = 'a'\n", "`models` in FILE must be a list of tables."),
        ("models = []\n", "`[[models]]` in FILE lists no model. Write a table for each, or leave `models` out."),
        ("models = ['a']\n", "`models` in FILE must be a list of tables."),
        ("[[models]]\nmodel = 'a'\n[[models]]\nmodel = 'a'\n", "`a` stands for two models, a and a."),
        ("[[models]]\nmodel = 'a'\naliases = ['b']\n[[models]]\nmodel = 'b'\n", "`b` stands for two models, a and b."),
        (
            "model = 'b'\n[[models]]\nmodel = 'a'\n",
            "`model` in FILE describes one model, and `[[models]]` in FILE lists",
        ),
        ("[[models]]\nmodel = 'a'\n[[models]]\nmodel = 'b'\ntop_p = 3\n", "b: --top-p: `top_p` must be at most 1"),
        ("top_k = 3\n[[models]]\nmodel = 'a'\n", "`top_k` in FILE describes one model, and `[[models]]` in FILE lists"),
    ],
)
def test_what_cannot_be_is_refused_by_its_place(tmp_path: Path, text: str, words: str) -> None:
    (path := tmp_path / "FILE").write_text(text)
    assert words in refusal(path).replace(str(path), "FILE")


def test_a_flag_or_a_variable_of_a_model_beside_the_list(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(file, model="demo").startswith("MODEL describes one model, and `[[models]]` in ")
    assert refusal(file, text_only=True).startswith("--text-only describes one model, and `[[models]]` in ")
    assert refusal(file, **read_models(["a", "b"])).startswith("The command line and `[[models]]`")
    monkeypatch.setenv("VLLM_MLX_TEMPERATURE", "1")
    assert refusal(file).startswith("VLLM_MLX_TEMPERATURE describes one model, and `[[models]]` in ")


def test_models_on_the_command_line(tmp_path: Path) -> None:
    (folder := tmp_path / "a=b").mkdir()
    assert read_models(["org/a"]) == {"model": "org/a"}
    assert read_models(["small=org/a"]) == {"model": "org/a", "served_model_name": ["small"]}
    assert read_models([str(folder)]) == {"model": str(folder)}
    settings = load_settings(read_models(["org/a", "small=org/b"]))
    assert settings.catalogue().names == ("org/a", "small")


def refused(*arguments: str) -> str:
    result = call("serve", *arguments, "--port", "0")
    assert result.returncode in (1, 2)
    return " ".join(result.stderr.split())


def test_a_name_that_is_given_twice_is_refused() -> None:
    assert "`demo` stands for two models, demo and demo." in refused("demo", "demo")
    assert "--served-model-name. Leave one of the two out." in refused("a=demo", "--served-model-name", "b")


def test_a_name_or_a_model_that_is_empty_is_refused() -> None:
    assert "`=demo` has no name before `=`. Write NAME=MODEL, or MODEL alone." in refused("=demo")
    assert "`a=` has no model after `=`. Write NAME=MODEL, or MODEL alone." in refused("a=")


def test_what_a_checkpoint_refuses_names_its_model() -> None:
    assert "b: No folder ./nowhere. Give a folder that exists" in refused("a=demo", "b=./nowhere")


def test_models_of_a_list_answer_to_all_their_names_and_leave_and_come_back(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    first, second = str(checkpoint("qwen3_5")), str(checkpoint("qwen3"))
    tables = (
        {"model": first, "name": "coder", "aliases": ["gpt-5"], "match": ["claude-*"]},
        {"model": second, "name": "small"},
    )
    written = [
        "[[models]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in each.items()) for each in tables
    ]
    (path := tmp_path / "models.toml").write_text("".join(written))
    with served("--config", str(path)) as (_, printed):
        assert "coder, gpt-5" in printed and "Beside" in printed and "small: qwen3" in printed
        url = printed[printed.index("http://") :].split("/v1")[0]
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            cards = http.get("/v1/models").json()["data"]
            facts = [(card["id"], card["aliases"], card["root"], card["pinned"], card["task"]) for card in cards]
            assert facts == [
                ("coder", ["gpt-5"], first, False, "chat"),
                ("gpt-5", ["coder"], first, False, "chat"),
                ("small", [], second, False, "chat"),
            ]
            for name in ("coder", "gpt-5", "claude-haiku", "small"):
                body = {"model": name, "prompt": "a", "max_tokens": 1}
                assert http.post("/v1/completions", json=body).json()["model"] == name
            unknown = http.post("/v1/completions", json={"model": "demo", "prompt": "a"})
            assert unknown.status_code == 404 and "serves `coder`, `gpt-5`, `small`." in unknown.text
            nameless = http.post("/v1/completions", json={"model": "", "prompt": "a"})
            assert "The name of the model is empty. This server serves `coder`, `gpt-5`, `small`." in nameless.text
            wrong = http.post("/v1/models/coder/leave").json()["error"]
            assert wrong["message"] == "/v1/models/coder/leave does not accept POST."
            status = http.get("/v1/status").json()
            assert [(row["name"], row["state"]) for row in status["models"]] == [("coder", "ready"), ("small", "ready")]
            assert 'vllm:num_requests_running{engine="0",model_name="small"} 0.0' in http.get("/metrics").text
            for act, states in (("unload", ["ready", "unloaded"]), ("load", ["ready", "ready"])):
                changed = http.post(f"/v1/models/small/{act}", params={"wait": "true"}).json()
                assert (changed["id"], changed["state"]) == ("small", states[1])
                listed = {card["root"]: card["state"] for card in http.get("/v1/models").json()["data"]}
                assert [*listed.values()] == states
                assert [row["state"] for row in http.get("/v1/status").json()["models"]] == states
        for name, act, state in (("claude-x", "unload", "unloaded"), ("gpt-5", "load", "ready")):
            assert call("models", act, name, "--url", url).stdout == f"coder is {state}.\n"
        asked = ("--model", "claude-haiku", "--url", url)
        assert call("chat", "Hi", "--max-tokens", "1", "--no-thinking", *asked).returncode == 0
        assert "export ANTHROPIC_MODEL=claude-haiku\n" in call("launch", "claude", "--print", *asked).stdout
        unknown_name = f"{url} does not serve gpt-4. It serves coder, gpt-5, small."
        assert unknown_name in refusal_of("chat", "Hi", "--model", "gpt-4", "--url", url, code=2)
        shown = call("models", VLLM_MLX_PORT=url.rpartition(":")[2]).stdout
        assert shown.count("A server serves:\n  coder (gpt-5): ready, chat, ") == shown.count("\n  small: ready, ") == 1
        script = call("launch", "claude", "--print", "--url", url).stdout
        assert script.splitlines()[0].endswith("; titles, summaries and other small tasks go to small")
        assert "export ANTHROPIC_MODEL=coder\nexport ANTHROPIC_DEFAULT_HAIKU_MODEL=small\n" in script
        script = call("launch", "claude", "--print", "--url", url, "--model", "small").stdout
        assert " small tasks go to small\n" in script
        assert "export ANTHROPIC_MODEL=small\nexport ANTHROPIC_DEFAULT_HAIKU_MODEL=small\n" in script, "none is smaller"


def test_doctor_checks_each_model_beside_the_others(checkpoint: Callable[..., Path]) -> None:
    path = Path("~/.config/vllm-mlx/config.toml").expanduser()
    path.parent.mkdir(parents=True)
    tables = [f"[[models]]\nmodel = {json.dumps(str(checkpoint(name)))}\npin = true\n" for name in ("qwen3", "llama")]
    path.write_text("".join(tables))
    result = call("doctor", "--quick", VLLM_MLX_PORT="0")
    assert result.returncode == 0 and result.stdout.count("of pinned models; ") == 2


def test_doctor_and_serve_refuse_a_model_without_room_for_a_step(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folders = [checkpoint(name) for name in ("qwen3", "llama")]
    num_bytes = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    tables = [f"[[models]]\nmodel = {json.dumps(str(folder))}\npin = true\n" for folder in folders]
    (path := tmp_path / "models.toml").write_text(f"memory_budget = {num_bytes * 21 // 20}\n{''.join(tables)}")
    result = call("doctor", "--quick", "--config", str(path), VLLM_MLX_PORT="0")
    for text in (" ".join(result.stdout.split()), refused("--config", str(path))):
        assert "Too little memory: the model needs " in text
        assert re.search(r", of which other models hold \d+\.\d MB\.", text)
    assert result.returncode == 1
