"""`vllm-mlx models` over a cache made as Hugging Face makes it, and `vllm-mlx cache` against a real server."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from scripts.generate_docs import MAC_SIZES, mac_budget
from tests.support.commands import address, call, refusal, served
from vllm_mlx.cli.cache import cache_tree
from vllm_mlx.cli.models import AGENT_CONTEXT, EXAMPLE, describe, fitting, nearest, recommended
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.runner.checkpoint import DEMO_PATH, find_checkpoint


@pytest.fixture
def hub(tmp_path: Path, checkpoint: Callable[..., Path]) -> Path:
    """A cache of one checkpoint and of one whose weights never came."""
    for name, files in (("whole", "*"), ("part", "*.json")):
        repo = tmp_path / f"models--org--{name}"
        snapshot = repo / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (repo / "blobs").mkdir()
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("abc")
        for file in checkpoint("qwen3").glob(files):
            shutil.copy(file, snapshot)
    return tmp_path


def test_what_is_cached_is_listed_with_what_it_speaks(hub: Path) -> None:
    result = call("models", "--json", HF_HUB_CACHE=str(hub))
    part, whole = json.loads(result.stdout)
    assert (part["name"], part["facts"]) == ("org/part", None)
    assert "Download the weights" in part["trouble"]
    facts = whole["facts"]
    assert (facts["architecture"], facts["kind"], facts["tools"]) == ("qwen3", "text", "hermes")
    assert facts["context"] == find_checkpoint(whole["folder"]).max_model_len
    long = f"org/{'a-long-name-' * 5}"
    for name in ("org/whole", long):
        if name == long:
            (hub / "models--org--whole").rename(hub / f"models--org--{long.removeprefix('org/')}")
        table = call("models", HF_HUB_CACHE=str(hub), COLUMNS="80").stdout
        first_words = [line.split()[0] for line in table.splitlines() if line.strip()]  # a long name has several lines
        assert name in "".join(first_words) and "qwen3, reasoning" in table
        assert "cannot be served" in table and "…" not in table and max(map(len, table.splitlines())) <= 80


def test_models_of_lm_studio_are_found_served_and_removed(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    name = "publisher/Some-Model-4bit"
    folder = tmp_path / ".lmstudio/models" / name
    shutil.copytree(checkpoint("qwen3"), folder)
    gguf = tmp_path / ".cache/lm-studio/models/publisher/Other-GGUF"
    gguf.mkdir(parents=True)
    (gguf / "other.gguf").touch()
    own = {"HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "none")}
    other, model = json.loads(call("models", "--json", **own).stdout)
    assert (model["name"], model["folder"], model["facts"]["architecture"]) == (name, str(folder), "qwen3")
    assert other["name"] == "publisher/Other-GGUF" and "is a GGUF file" in other["trouble"]
    line = call("serve", "some-model", "--port", "0", **own).stderr.splitlines()[-1]
    assert f"Similar names: {name} (on this machine)" in line
    with served(name, **own) as (_, printed):
        assert name in printed
        port = address(printed).rpartition(":")[2]
        line = refusal("models", "rm", name, "--yes", VLLM_MLX_PORT=port, **own)
        assert line.endswith(f"uses {name}. Stop it first.")
    assert "which frees" in refusal("models", "rm", name, code=2, VLLM_MLX_PORT="9", **own)
    assert folder.exists()
    assert call("models", "rm", name, "--yes", VLLM_MLX_PORT="9", **own).stdout.endswith(" freed.\n")
    assert not folder.exists()
    assert "is not a downloaded model" in refusal("models", "rm", name, "--yes", **own)


def test_files_of_macos_hide_no_model(hub: Path) -> None:
    def listed() -> list[str]:
        return [model["name"] for model in json.loads(call("models", "--json", HF_HUB_CACHE=str(hub)).stdout)]

    before = listed()
    for folder in [hub, *(path for path in hub.rglob("*") if path.is_dir())]:
        (folder / "._x").write_bytes(b"\x00\x05\x16\x07\xff".ljust(4096))
        (folder / ".DS_Store").write_bytes(bytes(64))
    assert before and listed() == before


def test_a_model_of_the_hub_is_removed_with_all_of_its_files(hub: Path) -> None:
    result = call("models", "rm", "org/whole", "--yes", HF_HUB_CACHE=str(hub), VLLM_MLX_PORT="9")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in hub.iterdir()] == ["models--org--part"]


def test_an_empty_cache_says_how_to_fill_it(tmp_path: Path) -> None:
    for budget, name in (("10.3GB", EXAMPLE), ("1GB", "ORG/NAME")):
        result = call("models", HF_HUB_CACHE=str(tmp_path / "none"), VLLM_MLX_MEMORY_BUDGET=budget)
        assert result.returncode == 0 and f"Fetch one with `vllm-mlx models pull {name}`" in result.stdout


QWEN9, QWEN4, GPT = "Qwen3.5-9B-MLX-4bit", "Qwen3.5-4B-MLX-4bit", "gpt-oss-20b-MXFP4-Q8"


@pytest.mark.parametrize(
    ("asked", "budget_gb", "names"),
    [
        ("Qwen3-8B", 10.3, [QWEN9]),
        ("qwen3:8b", 10.3, [QWEN9]),
        ("org/qwen3:8b", 92.8, [QWEN9]),
        ("Qwen3-8B", 5.2, []),  # none of that size fits
        ("qwen3:4b-instruct-q4_K_M", 5.2, [QWEN4]),
        ("qwen3:latest", 10.3, [QWEN9, QWEN4]),  # a name without a size
        ("qwen3:600m", 10.3, []),
        ("gpt-oss:20b", 20.6, [GPT]),
        ("gpt-oss:120b", 20.6, []),
        ("Qwen3-30B-A3B", 26.1, ["Qwen3.6-35B-A3B-4bit"]),
        ("llama3.1:8b", 92.8, []),
    ],
)
def test_proposed_names_fit_the_machine_and_the_size_that_was_asked_for(
    asked: str, budget_gb: float, names: list[str]
) -> None:
    told = nearest(asked, int(budget_gb * 1e9))
    assert re.findall(r"mlx-community/([^\s,]+?)(?=[,.]?(?:\s|$))", told) == names
    assert names or told == " `vllm-mlx doctor` names models that fit this machine."


def test_a_model_of_this_machine_is_proposed_if_it_is_about_as_large(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("Own-Model-7B-4bit", "Own-Model-70B-4bit"):
        shutil.copytree(checkpoint("qwen3"), tmp_path / ".lmstudio/models/publisher" / name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    assert nearest("own-model:8b") == " Similar names: publisher/Own-Model-7B-4bit (on this machine)."
    assert "Own-Model" not in nearest("own-model:8b", 1000), "it takes more memory"


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("nonsense", 2, "nonsense is not a name on Hugging Face: write ORG/NAME"),
        ("org/name", 1, "org/name is not on this machine and could not be downloaded."),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(tmp_path: Path, name: str, code: int, line: str) -> None:
    result = call("models", "pull", name, HF_HUB_CACHE=str(tmp_path))
    assert result.returncode == code
    assert line in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_what_is_there_is_pulled_at_once(hub: Path) -> None:
    result = call("models", "pull", "org/whole", HF_HUB_CACHE=str(hub))
    assert result.returncode == 0, result.stderr
    assert "qwen3, text" in result.stdout


def test_the_demo_is_described_by_its_files() -> None:
    facts = describe(DEMO_PATH)
    assert (facts.architecture, facts.kind, facts.precision, facts.context) == ("qwen3_5", "vision", "float32", 131072)
    assert facts.bytes_per_token == 2 * 2 * 2 * 2 * 64  # keys and values, 16 bits, of two full layers of two heads
    assert facts.tools is not None


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        describe(tmp_path)


def test_the_cache_is_shown_and_cleared(demo_url: str) -> None:
    body = {"prompt": "What is 2 + 3?", "max_tokens": 3}
    httpx.post(f"{demo_url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
    held = json.loads(call("cache", "memory", "--json", "--url", demo_url).stdout)
    assert held["data"]
    shown = call("cache", "memory", "--url", demo_url).stdout
    assert "tokens 0–" in shown
    assert call("cache", "clear", "--yes", "--url", demo_url).stdout.endswith(" freed.\n")
    assert json.loads(call("cache", "memory", "--json", "--url", demo_url).stdout)["data"] == []
    assert "No server answers" in refusal("cache", "clear", "--yes", "--url", "http://127.0.0.1:9")


def test_shared_beginnings_stand_once_above_what_continues_them() -> None:
    def entry(node: int, parent: int | None, start: int, end: int) -> dict[str, object]:
        sizes = {"segment_bytes": 1000, "state_bytes": 0, "hits": 1, "salted": False}
        return {"node_id": node, "parent_id": parent, "start": start, "end": end, **sizes}

    others = {"num_entries": 2, "num_tokens": 9, "num_bytes": 2_000_000}
    tree = cache_tree([entry(3, 1, 10, 20), entry(2, 1, 10, 15), entry(1, None, 0, 10)], {"enabled": True}, others)
    [first, sum_of_others] = tree.children
    assert str(sum_of_others.label) == "9 tokens of other keys  2.0 MB"
    assert str(first.label).startswith("tokens 0–10")
    assert [str(child.label)[:12] for child in first.children] == ["tokens 10–15", "tokens 10–20"]
    assert str(cache_tree([], {"enabled": False}, others).label) == "The prefix cache is off."


@pytest.mark.parametrize("size", MAC_SIZES)
def test_every_mac_is_recommended_something_that_fits(size: int) -> None:
    budget = mac_budget(size << 30)
    found = fitting(budget)
    assert found
    assert all(one.weights_bytes + AGENT_CONTEXT * one.bytes_per_token < budget for one in found)
    larger = [one for one in recommended() if one.weights_bytes > found[0].weights_bytes]
    assert all(one.needed_bytes(budget) > budget for one in larger)


def test_nothing_is_recommended_where_nothing_fits() -> None:
    assert fitting(2 * 10**9) == []


def test_recommended_checkpoints_are_ordered_by_size_and_named_once() -> None:
    sizes = [one.weights_bytes for one in recommended()]
    assert sizes == sorted(sizes) and len({one.name for one in recommended()}) == len(recommended())


def test_a_server_is_told_to_unload_a_model_and_to_load_it_again(demo_url: str) -> None:
    for act, state in (("unload", "unloaded"), ("unload", "unloaded"), ("load", "ready")):
        result = call("models", act, "--url", demo_url)
        assert (result.returncode, result.stdout) == (0, f"demo is {state}.\n"), result.stderr
    unknown = "The model `other` does not exist. This server serves `demo`."
    assert unknown in refusal("models", "unload", "other", "--url", demo_url)


def test_the_list_says_where_the_weights_of_served_models_are(hub: Path, demo_url: str) -> None:
    port = demo_url.rpartition(":")[2]
    listed = call("models", HF_HUB_CACHE=str(hub), VLLM_MLX_PORT=port).stdout
    assert "A server serves:\n  demo: ready, chat, " in listed
