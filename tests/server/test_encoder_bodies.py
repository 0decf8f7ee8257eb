"""Bodies and replies of embeddings and reranking, over a real socket: fields, forms, limits, models of another task."""

import base64
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.support.running import Running, eventually, serving
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.events import Vectors
from vllm_mlx.server.error_handlers import CLIENT_GONE

from .encoding import FakeEncoders, encoded, score, vector
from .fakes import Pause, Script

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
TEXTS = ["one", "two words", "größer 🦊"]
QUERY, DOCUMENTS = "red fox", ["a fox", "a red fox", "nothing", "the red fox again", "another fox"]
BEST = [1, 3, 0, 4, 2]  # equal scores in the order of the request
HI = {"messages": [{"role": "user", "content": "Hi."}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = FakeEncoders()
    with serving(engine, models=engine.models) as running:
        yield running


@pytest.fixture(autouse=True)
def engine(server: Running) -> FakeEncoders:
    engine: FakeEncoders = server.engine
    engine.play, engine.refuse = encoded, None
    engine.requests.clear()
    return engine


def embed(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post(EMBEDDINGS, json={"model": "e5", "input": TEXTS, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def rank(http: httpx.Client, path: str = RERANK, **fields: Any) -> Any:
    answer = http.post(path, json={"model": "judge", "query": QUERY, "documents": DOCUMENTS, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http: httpx.Client, path: str, **fields: Any) -> Any:
    answer = http.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_each_input_has_its_vector_in_both_formats(http: httpx.Client) -> None:
    plain, packed = embed(http), embed(http, encoding_format="base64")
    assert plain["object"] == "list" and plain["model"] == "e5"
    num_tokens = sum(map(len, TEXTS))
    assert plain["usage"] == packed["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    for number, (item, other) in enumerate(zip(plain["data"], packed["data"], strict=True)):
        assert item["object"] == other["object"] == "embedding" and item["index"] == other["index"] == number
        expected = vector(TEXTS[number])
        assert np.array_equal(np.array(item["embedding"], np.float32), expected)
        assert np.array_equal(np.frombuffer(base64.b64decode(other["embedding"]), "<f4"), expected)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        ([5, 6], ((5, 6),)),
        ([[5, 6], [7]], ((5, 6), (7,))),
        ([5] * 3000, ((5,) * 3000,)),  # one input
        ("a\ud83d", ("a\ufffd",)),
    ],
)
def test_an_input_is_a_text_several_or_token_ids(
    http: httpx.Client, engine: FakeEncoders, given: Any, texts: Any
) -> None:
    answer = http.post(EMBEDDINGS, content=json.dumps({"model": "e5", "input": given}), headers=JSON)
    assert answer.status_code == 200 and len(answer.json()["data"]) == len(texts)
    [request] = engine.requests
    assert request.texts is not None and request.texts.texts == texts


JSON = {"content-type": "application/json"}


def test_the_fields_reach_the_engine(http: httpx.Client, engine: FakeEncoders) -> None:
    embed(http, dimensions=3, prompt_name="query", truncate=True, user="me")
    rank(http, instruction="Judge.", truncate=True)
    embedding, ranking = (request.texts for request in engine.requests)
    assert embedding is not None and ranking is not None
    assert (embedding.dimensions, embedding.prompt_name, embedding.truncate) == (3, "query", True)
    assert embedding.query is None and embedding.instruction is None
    assert (ranking.query, ranking.instruction, ranking.truncate) == (QUERY, "Judge.", True)
    assert [request.model for request in engine.requests] == [1, 2]


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
def test_the_best_documents_come_first(http: httpx.Client, path: str) -> None:
    reply = rank(http, path)
    assert [(item["index"], item["relevance_score"]) for item in reply["results"]] == [
        (index, score(QUERY, DOCUMENTS[index])) for index in BEST
    ]
    assert not any("document" in item for item in reply["results"])
    num_tokens = sum(map(len, DOCUMENTS))
    assert reply["usage"]["total_tokens"] == reply["meta"]["tokens"]["input_tokens"] == num_tokens
    assert [item["index"] for item in rank(http, path, top_n=2)["results"]] == BEST[:2]
    assert len(rank(http, path, top_n=99)["results"]) == len(DOCUMENTS)


def test_documents_are_texts_or_objects_and_come_back_if_asked(http: httpx.Client, engine: FakeEncoders) -> None:
    objects = [{"text": text, "title": "own data"} for text in DOCUMENTS[:2]]
    answer = http.post(RERANK, json={"query": QUERY, "documents": [*objects, *DOCUMENTS[2:]], "return_documents": True})
    found = {item["index"]: item["document"]["text"] for item in answer.json()["results"]}
    assert found == dict(enumerate(DOCUMENTS)) and answer.headers["x-unknown-fields"] == "documents[].title"
    assert engine.requests[0].texts is not None and engine.requests[0].texts.texts == tuple(DOCUMENTS)


def test_names_with_any_sign_are_written_as_json() -> None:
    name = 'a":[] "b'
    engine = FakeEncoders(names=("e5",))
    with serving(engine, served_model_names=[name]) as running, running.http() as http:
        assert http.post(EMBEDDINGS, json={"input": "a"}).json()["model"] == name


def test_a_long_reply_is_the_same_as_short_ones(http: httpx.Client) -> None:
    texts = [f"text {number}" for number in range(2048)]
    data = embed(http, input=texts)["data"]
    assert [item["index"] for item in data] == list(range(2048))
    assert data[1999]["embedding"] == embed(http, input=texts[1999])["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (EMBEDDINGS, {}, "input", "required"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input", "2049 texts"),
        (EMBEDDINGS, {"input": [[1]] * 2049}, "input", "at most 2048"),
        (EMBEDDINGS, {"input": ["a", 5]}, None, "`input"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions", "1"),
        (EMBEDDINGS, {"input": "a", "input_type": "search_query"}, "input_type", "prompt_name"),
        (EMBEDDINGS, {"input": "a", "normalized": True}, "normalized", "checkpoint"),
        (EMBEDDINGS, {"input": "a", "surprise": 1}, "surprise", "Unknown"),
        (RERANK, {"query": "a"}, "documents", "required"),
        (RERANK, {"documents": ["a"]}, "query", "required"),
        (RERANK, {"query": "a", "documents": ["a"] * 2049}, "documents", "2049 texts"),
        (RERANK, {"query": "a", "documents": [{"title": "a"}]}, None, "documents[0]"),
        (RERANK, {"query": "a", "documents": [{"text": "a", "image": "b"}]}, "documents[0].image", "Images"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "1"),
        (RERANK, {"query": "a", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields", "`text`"),
        (RERANK, {"query": "a", "documents": ["a"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", "truncate"),
        (RERANK, {"query": "a", "documents": ["a"], "top_k": 1}, "top_k", "top_n"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    http: httpx.Client, engine: FakeEncoders, path: str, fields: Any, param: str | None, words: str
) -> None:
    error = refusal(http, path, **fields)
    assert words in error["message"] and (param is None or error["param"] == param)
    assert not engine.requests


def test_an_input_that_the_engine_refuses_is_named(http: httpx.Client, engine: FakeEncoders) -> None:
    engine.refuse = InvalidParameter("`input[1]` is empty.", param="input[1]")
    assert refusal(http, EMBEDDINGS, input=["a", ""])["param"] == "input[1]"


ASKED: Any = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {**HI, "max_tokens": 9},
    "/v1/messages/count_tokens": HI,
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    EMBEDDINGS: {"input": "a"},
    RERANK: {"query": "a", "documents": ["a"]},
    "/v2/rerank": {"query": "a", "documents": ["a"]},
}
FITS = dict.fromkeys(ASKED, "coder") | {EMBEDDINGS: "e5", RERANK: "judge", "/v2/rerank": "judge"}


@pytest.mark.parametrize("path", ASKED)
def test_a_model_of_another_task_is_refused_with_one_that_fits(
    http: httpx.Client, engine: FakeEncoders, path: str
) -> None:
    for model in ("coder", "e5", "judge"):
        answer = http.post(path, json={**ASKED[path], "model": model})
        assert answer.status_code == (200 if FITS[path] == model else 400), answer.text
        if answer.is_error:
            said = answer.json()["error"]["message"]
            assert f"`{model}`" in said and f"`{FITS[path]}`" in said
    assert http.post(path, json=ASKED[path]).status_code == 200  # the first model of the task
    assert len(engine.requests) + len(engine.counted) >= 2
    engine.counted.clear()


def test_without_a_fitting_model_the_refusal_says_what_to_do() -> None:
    engine = FakeEncoders(names=("coder",))
    with serving(engine, models=engine.models) as running, running.http() as http:
        assert "one more model" in refusal(http, EMBEDDINGS, input="a")["message"]
        assert [card["task"] for card in http.get("/v1/models").json()["data"]] == ["chat"]


def test_the_list_of_models_names_the_task(http: httpx.Client) -> None:
    assert [card["task"] for card in http.get("/v1/models").json()["data"]] == ["chat", "embedding", "rerank"]


def test_a_client_that_leaves_ends_its_request(
    http: httpx.Client, engine: FakeEncoders, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm_mlx.requests")
    engine.play = lambda request, index: (Pause(),)
    engine.aborted.clear()
    with pytest.raises(httpx.ReadTimeout):
        http.post(EMBEDDINGS, json={"input": ["a", "b"]}, timeout=0.5)
    eventually(lambda: len(engine.aborted) == 1)

    eventually(lambda: f"status={CLIENT_GONE}" in caplog.text)
    [line] = [line for line in caplog.messages if f"status={CLIENT_GONE}" in line]
    assert " inputs=2 " in line


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (EMBEDDINGS, {"input": ["a", "b"]}),
        (EMBEDDINGS, {"input": "a", "encoding_format": "base64"}),
        (RERANK, {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_value_that_json_lacks_is_an_error(
    http: httpx.Client, engine: FakeEncoders, path: str, fields: Any, value: float
) -> None:
    def broken(request: Any, index: int) -> Script:
        started, _, finished = encoded(request, index)
        values = [np.float32(value)] if path == RERANK else [np.array([0, value], np.float32)]
        return started, Vectors(values), finished

    engine.play = broken
    answer = http.post(path, json=fields)
    assert answer.status_code == 500 and "not a finite number" in answer.json()["error"]["message"]


def test_openai_reads_the_vectors(server: Running, engine: FakeEncoders) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            reply = client.embeddings.create(model="e5", input=TEXTS, **options)  # type: ignore[arg-type]
            for text, item in zip(TEXTS, reply.data, strict=True):
                value: Any = item.embedding
                found = np.frombuffer(base64.b64decode(value), "<f4") if isinstance(value, str) else value
                assert np.array_equal(np.array(found, np.float32), vector(text))
        with pytest.raises(openai.BadRequestError, match="`e5`"):
            client.embeddings.create(model="coder", input="a")


def test_cohere_reads_the_scores(server: Running, engine: FakeEncoders) -> None:
    cohere = pytest.importorskip("cohere")
    for client in (cohere.Client, cohere.ClientV2):
        with client(api_key="any", base_url=server.url) as asked:
            reply = asked.rerank(model="judge", query=QUERY, documents=DOCUMENTS, top_n=3)
            assert [item.index for item in reply.results] == BEST[:3]
            assert reply.results[0].relevance_score == 1.0
