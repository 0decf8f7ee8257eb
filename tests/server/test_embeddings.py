"""Embeddings and reranking by real models over a real socket: values, limits, figures, clients of editors."""

import base64
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

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


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


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


def test_roo_and_kilo(http: httpx.Client) -> None:
    """They ask for base64, read little-endian floats, and compare their number with the user's setting."""
    body = {"input": [" ".join(TEXTS[:2]), TEXTS[3]], "model": "e5", "encoding_format": "base64"}
    reply = http.post(EMBEDDINGS, json=body, headers={"authorization": "Bearer any", "api-key": "any"}).json()
    for item, plain in zip(reply["data"], embed(http, body["input"]), strict=True):
        floats = np.frombuffer(base64.b64decode(item["embedding"], validate=True), "<f4")
        assert len(floats) == 64 and np.array_equal(floats, plain)
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 0


def test_open_webui(http: httpx.Client) -> None:
    """It embeds a list of texts, and puts the scores of a reranker back into the order of its documents."""
    headers = {"x-openwebui-user-name": "ann", "authorization": "Bearer any"}
    reply = http.post(EMBEDDINGS, json={"input": TEXTS, "model": "e5"}, headers=headers).json()
    assert [len(item["embedding"]) for item in reply["data"]] == [64] * len(TEXTS)
    body = {"model": "judge", "query": QUERY, "documents": TEXTS, "top_n": len(TEXTS)}
    results = http.post("/rerank", json=body, headers=headers).json()["results"]
    scores = [item["relevance_score"] for item in sorted(results, key=lambda item: item["index"])]
    assert len(scores) == len(TEXTS)


def test_continue(server: Running) -> None:
    """Its vectors come through OpenAI's package; it takes a reranker's scores by their indices."""
    with openai.OpenAI(base_url=f"{server.url}/v1/", api_key="any", max_retries=0) as client:
        data = client.embeddings.create(model="e5", input=TEXTS).data
        assert [len(item.embedding) for item in data] == [64] * len(TEXTS)
    with server.http() as http:
        body = {"model": "judge", "query": QUERY, "documents": TEXTS}
        results = http.post(RERANK, json=body, headers={"authorization": "Bearer any"}).json()["results"]
        assert sorted(item["index"] for item in results) == list(range(len(TEXTS)))


def test_minuet(http: httpx.Client) -> None:
    """It sends a prompt and a suffix, streamed. A model without the tokens for this refuses the suffix by its name."""
    body = {
        "model": "coder", "prompt": "def add(a, b):\n", "suffix": "\nprint(add(1, 2))", "stream": True,
        "max_tokens": 8, "top_p": 0.9, "stop": ["\n\n"],
    }  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "suffix"
        answer = http.post("/v1/completions", json={name: body[name] for name in body if name != "suffix"})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events and all("text" in event["choices"][0] for event in events)


def test_cohere(server: Running) -> None:
    cohere = pytest.importorskip("cohere")
    with cohere.ClientV2(api_key="any", base_url=server.url) as client:
        reply = client.rerank(model="judge", query=QUERY, documents=TEXTS, top_n=2)
    assert len(reply.results) == 2 and reply.meta.tokens.input_tokens > 0
