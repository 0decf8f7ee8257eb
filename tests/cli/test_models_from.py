"""`chat`, `launch` and `doctor` where models are found in folders: the one in memory, a choice, and what each takes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.commands import address, call, refusal, served

from .terminal import terminal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, family in (("one", "qwen3"), ("two", "llama")):
        shutil.copytree(checkpoint(family), path / name)
    (path / "bad").mkdir()
    (path / "bad/config.json").write_text("{")
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served("--models-from", str(folder)) as (_, printed):
        yield address(printed)


def test_without_a_name_the_model_in_memory_is_taken_or_one_must_be_chosen(url: str) -> None:
    for command in (("chat", "hi"), ("launch", "claude", "--print")):
        result = call(*command, "--url", url)
        assert result.returncode == 2 and "  1  one\n" in result.stderr and "  2  two\n" in result.stderr
        assert "bad" not in result.stderr and "with --model" in result.stderr
    assert call("chat", "hi", "--url", url, "--model", "two", "--max-tokens", "4").returncode == 0
    assert "two" in call("launch", "claude", "--print", "--url", url).stdout
    assert call("chat", "hi", "--url", url, "--max-tokens", "4").returncode == 0
    rows = httpx.get(f"{url}/v1/status").json()["models"]
    assert [(row["name"], row["total_requests_processed"]) for row in rows] == [("two", 2)]
    assert "two" in call("status", "--url", url).stdout


def test_status_of_a_server_that_nobody_asked_anything(folder: Path) -> None:
    with served("--models-from", str(folder)) as (_, printed):
        assert "no model was asked for yet" in call("status", "--url", address(printed)).stdout


def test_doctor_says_what_each_would_take(folder: Path) -> None:
    result = call("doctor", "--models-from", str(folder), "--json", "--quick", VLLM_MLX_PORT="0")
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    own = {name: check for name, check in checks.items() if name.startswith("Model ")}
    assert own.keys() == {f"Model {folder.name}/{name}" for name in ("one", "two", "bad")}
    assert "remain" in own[f"Model {folder.name}/one"]["text"]
    assert own[f"Model {folder.name}/bad"]["verdict"] == "warning"


def test_a_chat_goes_on_with_another_model(url: str) -> None:
    with terminal("chat", "--url", url, "--model", "two", "--max-tokens", "4", "--no-history") as person:
        person.wait_for("two at (.|\n)*›")
        person.type("/model")
        person.wait_for("Number of the model: ")
        person.type("2")  # what is in memory comes first
        person.wait_for("›")
        person.type("hello")
        person.wait_for("prompt .* cached")
    rows = httpx.get(f"{url}/v1/status").json()["models"]
    assert {"one": 1}.items() <= {row["name"]: row["total_requests_processed"] for row in rows}.items()


@pytest.mark.parametrize("flag", ["--revision", "--served-model-name", "--chat-template", "--draft-model"])
def test_a_setting_of_one_checkpoint_needs_its_name(folder: Path, flag: str) -> None:
    assert f"{flag} describes one model" in refusal("serve", "--models-from", str(folder), flag, "{{ messages }}")
