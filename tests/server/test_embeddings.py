"""Embeddings and reranking by real models over a real socket: values, limits, figures."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.project.sources import ROOT
from tests.support.encoders import make_encoder
from tests.support.running import Running, eventually, serving
from tests.support.running_encoder import RunningEncoder, cosine
from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import EngineConfig, ModelConfig
from vllm_mlx.engine.loading import start_engine

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
TEXTS = ["def add(a, b):", "a quick brown fox", "größer 🦊", "the rain in spring"]
QUERY = "the quick fox"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    prompts = {"query": "search: ", "document": "read: "}
    return {
        "e5": make_encoder(folder / "e5", "bert", prompts=prompts, max_tokens=64),
        "judge": make_encoder(folder / "judge", "bert", task="rerank", max_position_embeddings=128),
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], checkpoint: Callable[..., Path]) -> Iterator[Running]:
    paths = {"coder": checkpoint("qwen3"), **folders}
    entries = tuple(Entry(config=ModelConfig(model=str(path)), name=name) for name, path in paths.items())
    config = EngineConfig(model=str(paths["coder"]), memory_budget_bytes=4 << 30)
    with serving(start_engine(config, None, Catalogue(entries)), models=Catalogue(entries)) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(folders: dict[str, Path]) -> dict[str, RunningEncoder]:
    return {name: RunningEncoder(path) for name, path in folders.items()}


def embed(http: httpx.Client, given: Any, **fields: Any) -> np.ndarray:
    answer = http.post(EMBEDDINGS, json={"model": "e5", "input": given, **fields})
    assert answer.status_code == 200, answer.text
    return np.array([item["embedding"] for item in answer.json()["data"]], np.float32)


def refusal(http: httpx.Client, path: str, **fields: Any) -> Any:
    answer = http.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_the_vectors_are_the_models_own(http: httpx.Client, oracle: dict[str, RunningEncoder]) -> None:
    for options in ({}, {"prompt_name": "query"}):
        expected = oracle["e5"].vectors(TEXTS, **options)
        for one, other in zip(embed(http, TEXTS, **options), expected, strict=True):
            assert cosine(one, other) > 0.99999
    assert cosine(*embed(http, TEXTS[:1]), *embed(http, TEXTS[:1], prompt_name="query")) < 0.9999


def test_the_scores_are_the_models_own(http: httpx.Client, oracle: dict[str, RunningEncoder]) -> None:
    documents = [*TEXTS, TEXTS[1]]  # two of equal scores
    reply = http.post(RERANK, json={"query": QUERY, "documents": documents}).json()
    scores = oracle["judge"].scores(QUERY, documents).reshape(-1)
    for item in reply["results"]:
        assert abs(item["relevance_score"] - scores[item["index"]]) < 1e-4 and 0 <= item["relevance_score"] <= 1
    found = [item["relevance_score"] for item in reply["results"]]
    assert found == sorted(found, reverse=True)
    places = [item["index"] for item in reply["results"]]
    assert places.index(1) + 1 == places.index(4)


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (EMBEDDINGS, {"input": []}, "input", "empty"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input[1]", "empty"),
        (EMBEDDINGS, {"input": [[5], []]}, "input[1]", "empty"),
        (EMBEDDINGS, {"input": [[5], [-1]]}, "input[1]", "token id"),
        (EMBEDDINGS, {"input": [5, 10**30]}, "input[0]", "token id"),
        (EMBEDDINGS, {"input": ["a", "fox " * 200]}, "input[1]", "truncate"),
        (EMBEDDINGS, {"input": "a", "dimensions": 7}, "dimensions", "64"),
        (EMBEDDINGS, {"input": "a", "prompt_name": "other"}, "prompt_name", "query"),
        (RERANK, {"query": "", "documents": ["a"]}, "query", "a text"),
        (RERANK, {"query": "a", "documents": []}, "documents", "empty"),
        (RERANK, {"query": "a", "documents": ["a", "fox " * 200]}, "documents[1]", "truncate"),
        (RERANK, {"query": "a", "documents": ["a"], "instruction": "Judge."}, "instruction", "instruction"),
    ],
)
def test_inputs_that_cannot_be_read_are_named(
    http: httpx.Client, path: str, fields: Any, param: str, words: str
) -> None:
    error = refusal(http, path, **fields)
    assert error["param"] == param and words in error["message"], error


def test_a_long_input_is_cut_if_asked_and_usage_counts_what_was_read(http: httpx.Client) -> None:
    body = {"model": "e5", "input": "fox " * 200, "truncate": True}
    assert http.post(EMBEDDINGS, json=body).json()["usage"]["prompt_tokens"] == 64
    body = {"query": QUERY, "documents": ["fox " * 200], "truncate": True}
    assert http.post(RERANK, json=body).json()["usage"]["total_tokens"] == 128


def test_figures_count_texts_and_tokens(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    def figures(name: str) -> tuple[int, int]:
        status = http.get("/v1/status").json()
        [row] = [row for row in status["models"] if row["name"] == name]
        found = row["total_encoded_inputs"], row["total_encoded_tokens"]
        metrics = http.get("/metrics").text
        for figure, number in zip(("inputs", "tokens"), found, strict=True):
            assert f'vllm_mlx_encoded_{figure}_total{{model_name="{name}"}} {float(number)}' in metrics
        return found

    for name, path, fields in (
        ("e5", EMBEDDINGS, {"input": TEXTS}),
        ("judge", RERANK, {"query": QUERY, "documents": TEXTS}),
    ):
        before = figures(name)
        with caplog.at_level(logging.INFO, "vllm_mlx.requests"):
            answer = http.post(path, json={"model": name, **fields})
        num_tokens = answer.json()["usage"]["total_tokens"]
        after = figures(name)
        assert (after[0] - before[0], after[1] - before[1]) == (len(TEXTS), num_tokens)
        eventually(lambda path=path: any(f"path={path}" in line for line in caplog.messages))
        [line] = [line for line in caplog.messages if f"path={path}" in line]
        assert f" inputs={len(TEXTS)} " in line and f" prompt_tokens={num_tokens} " in line
        assert TEXTS[1] not in caplog.text
        caplog.clear()
    last = http.get("/v1/status").json()["last_replies"][0]
    assert (last["path"], last["served_by"], last["finish"]) == (RERANK, "judge", "stop")


def test_the_example_of_the_page_answers(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/embeddings.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 15
    for name, other in {"http://127.0.0.1:8000": server.url, '"embedder"': '"e5"', '"reranker"': '"judge"'}.items():
        assert name in example
        example = example.replace(name, other)
    exec(compile(example, "docs/embeddings.md", "exec"), {})
    assert capsys.readouterr().out.strip()
