"""`serve --models-from`: every checkpoint in a folder by its name, loaded when it is asked for, and nothing outside."""

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.commands import address
from tests.support.commands import served as command

FAMILIES = (
    "llama", "qwen3", "qwen3_5", "gpt_oss", "smollm3", "gemma3_text", "cohere2", "granitemoehybrid", "jamba", "falcon_h1",
    "qwen3_next", "vision:qwen3_vl",
)  # fmt: skip
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "asks", "what", "is", "new")
TIGHT = ("--memory-budget", "8MB", "--max-model-len", "1024", "--max-prefill-chunk", "64", "--max-num-seqs", "8")


def place(folder: Path, name: str, family: str = "qwen3") -> Path:
    """Put a checkpoint into a folder of models, as ORG/NAME or NAME."""
    shutil.copytree(checkpoint(family), folder / name)
    return folder / name


def damage(path: Path, how: str) -> None:
    weights = path / "model.safetensors"
    match how:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:5000])
        case "config":
            (path / "config.json").write_text("{")
        case "part":
            weights.rename(path / "model-00001-of-00002.safetensors")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty checkpoints of twelve families: three of them damaged, two with the same short name."""
    folder = tmp_path_factory.mktemp("models")
    for number in range(36):
        family = FAMILIES[number % len(FAMILIES)]
        place(folder, f"org/{family.partition(':')[2] or family}-{number // len(FAMILIES)}", family)
    for how in ("cut", "config", "part"):
        damage(place(folder, f"bad/{how}"), how)
    place(folder, "other/llama-0", "llama")
    return folder


@contextmanager
def served(*arguments: str | Path, **variables: str) -> Iterator[httpx.Client]:
    with command(*map(str, arguments), **variables) as (_, printed):
        with httpx.Client(base_url=address(printed), timeout=240, trust_env=False) as client:
            yield client


def cards(client: httpx.Client) -> dict[str, Any]:
    return {card["id"]: card for card in client.get("/v1/models").json()["data"]}


def ask(client: httpx.Client, model: str | None, text: str = "hello there", **fields: Any) -> httpx.Response:
    said = [{"role": "user", "content": text}]
    body = {"messages": said, "max_tokens": 8, "temperature": 0, **({} if model is None else {"model": model})}
    return client.post("/v1/chat/completions", json={**body, **fields})


def said(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice["message"], choice["finish_reason"], answer.json()["usage"]["prompt_tokens"]


def check_many(shelf: Path, num_models: int, num_requests: int) -> None:
    """Random requests, by both names, to models of which two have room: every reply is as alone."""
    draw, names = random.Random(7), [f"{family.partition(':')[2] or family}-1" for family in FAMILIES[:num_models]]
    texts = [" ".join(draw.choice(WORDS) for _ in range(10 + 10 * number)) for number in range(3)]
    with served("--models-from", shelf, "--max-model-len", "1024", "--max-prefill-chunk", "64") as client:
        alone = {(name, text): said(ask(client, name, text)) for name in names for text in texts}
    asked = [(draw.choice(names), draw.choice(texts), draw.choice(("", "org/"))) for _ in range(num_requests)]
    with served("--models-from", shelf, *TIGHT) as client, ThreadPoolExecutor(8) as pool:
        replies = pool.map(lambda one: said(ask(client, one[2] + one[0], one[1])), asked)
        for (name, text, _), reply in zip(asked, replies, strict=True):
            assert reply == alone[name, text]
        status = client.get("/v1/status").json()
    assert status["outcomes"]["failed"] == status["outcomes"]["aborted"] == status["num_restarts"] == 0
    assert sum(row["loads"]["request"] for row in status["models"]) >= num_models
    assert sum(row["state"] == "ready" for row in status["models"]) < num_models


def test_a_dozen_requests_for_models_of_which_two_have_room(shelf: Path) -> None:
    check_many(shelf, 3, 12)


@pytest.mark.full
def test_three_hundred_requests_for_eight_models_of_which_two_have_room(shelf: Path) -> None:
    check_many(shelf, 8, 300)
