"""`vllm-mlx doctor`: what it finds good, and what it says of what is not."""

import contextlib
import io
import json
import logging
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import mlx.core as mx
import pytest

from tests.support.commands import call
from vllm_mlx.cli.doctor import check_device
from vllm_mlx.cli.main import make_app


def verdicts(*arguments: str, **variables: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run the command in this process, which has imported already what the checks need."""
    printed, logger = io.StringIO(), logging.getLogger("vllm_mlx")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            make_app()(["doctor", "--json", *arguments])
    logger.setLevel(level)
    logging.captureWarnings(False)
    checks = json.loads(printed.getvalue())
    return int(ended.value.code or 0), {check["name"]: (check["verdict"], check["text"]) for check in checks}


def test_a_machine_that_can_serve_and_its_self_test() -> None:
    result = call("doctor", VLLM_MLX_PORT="0")
    assert result.returncode == 0, result.stdout
    for line in ("✓ Python", "MLX", "✓ Memory", "✓ Port", "✓ Model        demo: qwen3_5", "✓ Self-test    cold and"):
        assert line in result.stdout


@pytest.mark.parametrize(
    ("variables", "verdict", "words"),
    [
        ({"VLLM_MLX_CACHE_DISK": "0"}, "good", "not kept on disk, because a setting"),
        ({"VLLM_MLX_PREFIX_CACHE": "false", "VLLM_MLX_CACHE_DISK": ""}, "good", "not kept on disk, because a setting"),
        ({"VLLM_MLX_CACHE_DISK": "900TB"}, "warning", "has less space than --cache-disk asks for"),
        ({"VLLM_MLX_CACHE_DISK": "10MB"}, "warning", "which is little"),
        ({"VLLM_MLX_CACHE_DISK": "6GB"}, "good", "of at most 6.0 GB"),
    ],
)
def test_the_folder_of_cached_state_is_looked_at(
    tmp_path: Path, variables: dict[str, str], verdict: str, words: str
) -> None:
    folder = str(tmp_path / "kept")
    code, found = verdicts("--quick", VLLM_MLX_PORT="0", VLLM_MLX_CACHE_DIR=folder, **variables)
    assert (code, found["Cache"][0]) == (0, verdict)
    assert words in found["Cache"][1]
    assert not Path(folder).exists()


def test_a_folder_that_cannot_hold_cached_state_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    variables = {"VLLM_MLX_CACHE_DIR": str(tmp_path / "file"), "VLLM_MLX_CACHE_DISK": "1GB"}
    code, found = verdicts("--quick", VLLM_MLX_PORT="0", **variables)
    assert (code, found["Cache"][0]) == (0, "warning")
    assert "--cache-dir names a folder" in found["Cache"][1]


def test_a_port_that_another_program_holds_is_bad() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, found = verdicts("--quick", VLLM_MLX_PORT=port)
    assert code == 1
    assert found["Port"][0] == "bad"
    assert f"Port {port} on 127.0.0.1 is taken" in found["Port"][1]


def test_a_port_that_our_server_holds_is_good(demo_url: str) -> None:
    _, found = verdicts("--quick", VLLM_MLX_PORT=str(urlsplit(demo_url).port))
    assert found["Port"] == ("good", f"a server is running already: {demo_url} serves demo")


def test_a_model_that_is_too_large_or_no_model_is_bad(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(checkpoint("qwen3"))
    code, found = verdicts(folder, "--quick", VLLM_MLX_MEMORY_BUDGET="1MB", VLLM_MLX_PORT="0")
    assert (code, found[f"Model {folder}"][0]) == (1, "bad")
    assert "it does not fit 1.0 MB. Choose a smaller" in found[f"Model {folder}"][1]
    assert "2 Macs with as much memory hold it" in found[f"Model {folder}"][1]
    code, found = verdicts(str(tmp_path), "--quick", VLLM_MLX_PORT="0")
    assert (code, found[f"Model {tmp_path}"][0]) == (1, "bad")


def test_a_model_with_a_width_for_each_layer_is_checked(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "listed"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    widths = {"model_type": "gemma3n_text", "intermediate_size": [128] * config["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps(config | widths))
    _, found = verdicts(str(folder), "--quick", VLLM_MLX_PORT="0")
    assert " remain, about " in found[f"Model {folder}"][1]


def test_a_model_that_is_not_here_is_no_failure() -> None:
    code, found = verdicts("org/name", "--quick", VLLM_MLX_PORT="0")
    assert code == 0
    assert found["Model org/name"][0] == "warning"
    assert "vllm-mlx models pull org/name" in found["Model org/name"][1]


def test_checkpoints_that_fit_the_budget_are_recommended() -> None:
    _, found = verdicts("--quick", VLLM_MLX_PORT="0", VLLM_MLX_MEMORY_BUDGET="21GB")
    assert found["Choice"][0] == "good"
    assert "40,000 tokens of context fit, by computation: mlx-community/Qwen3.8-27B-4bit" in found["Choice"][1]


def test_a_model_that_is_nowhere_is_bad() -> None:
    code, found = verdicts("nonsense", "--quick", VLLM_MLX_PORT="0")
    assert (code, found["Model nonsense"][0]) == (1, "bad")
    assert "such as org/name" in found["Model nonsense"][1]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("web_search", "nonsense"),
        ("tool_call_parser", "nonsense"),
        ("host", "0.0.0.0"),
        ("media_root", "/no/such/folder"),
        ("chat_template", "{% if"),
    ],
)
def test_what_serve_refuses_is_bad_in_the_same_words(setting: str, value: str) -> None:
    variables = {f"VLLM_MLX_{setting.upper()}": value, "VLLM_MLX_PORT": "0"}
    refused = call("serve", "demo", **variables).stderr.strip().removeprefix("vllm-mlx: ")
    code, found = verdicts("demo", "--quick", **variables)
    assert code == 1 and ("bad", refused) in found.values()
    assert found["Port"][0] == "good"  # a bad setting does not end the other checks


@pytest.mark.parametrize(
    ("file", "is_warned"),
    [
        ("/opt/homebrew/Cellar/mlx/0.32.4/lib/python3.13/site-packages/mlx/core.so", True),
        ("/usr/local/Cellar/mlx/0.32.4_1/lib/python3.13/site-packages/mlx/core.so", True),
        ("/opt/homebrew/Cellar/vllm-mlx/1.0/libexec/lib/python3.13/site-packages/mlx/core.so", False),
        ("/Users/ann/.venv/lib/python3.13/site-packages/mlx/core.so", False),
    ],
)
def test_an_mlx_of_homebrew_is_warned_of(monkeypatch: pytest.MonkeyPatch, file: str, is_warned: bool) -> None:
    monkeypatch.setattr(mx, "__file__", file)
    check = check_device()
    assert ("Homebrew" in check.text) == is_warned
    assert not is_warned or check.verdict == "warning"
