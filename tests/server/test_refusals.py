"""What a refusal says: in the envelope of its protocol, and short, whatever the client sent."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.golden.streams import ASKED as BODIES
from tests.golden.streams import PATHS
from tests.support.running import Running, serving
from vllm_mlx.api.anthropic.schema import CountTokensBody, MessagesBody
from vllm_mlx.api.encoders.schema import EMBEDDING_FIELDS, RERANK_FIELDS, EmbeddingBody, RerankBody
from vllm_mlx.api.openai.schema import BODY_FIELDS as OPENAI_FIELDS
from vllm_mlx.api.openai.schema import ChatCompletionBody, CompletionBody
from vllm_mlx.api.replies import MAX_ERROR_CHARS
from vllm_mlx.api.responses.schema import BODY_FIELDS as RESPONSES_FIELDS
from vllm_mlx.api.responses.schema import ResponsesBody

from .encoding import FakeEncoders

LONG = "b" * 100_000
CHAT, COMPLETIONS, MESSAGES, RESPONSES = PATHS.values()
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
ASKED: Any = {PATHS[name]: {**body, "model": "coder"} for name, body in BODIES.items()}
ASKED |= {EMBEDDINGS: {"input": "a"}, RERANK: {"query": "a", "documents": ["a"]}}
TOOL: Any = {"type": "function", "function": {"name": "f"}}
TAG: Any = {"structures": [{"begin": LONG, "schema": {}, "end": "x"}], "triggers": ["a"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = FakeEncoders()
    with serving(engine, models=engine.models) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http(headers={"content-type": "application/json"}) as client:
        yield client


def message_of(answer: httpx.Response) -> str:
    """Of an error in its protocol's envelope."""
    reply = answer.json()
    assert (reply.get("type") == "error") == str(answer.url.path).startswith(MESSAGES)
    message: str = reply["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"model": LONG}),
        (CHAT, {LONG: 1}),
        (CHAT, {"messages": [{"role": LONG, "content": "a"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a", LONG: 1}]}),
        (CHAT, {"tool_choice": LONG, "tools": [TOOL]}),
        (CHAT, {"logit_bias": {LONG: 1}}),
        (CHAT, {"logit_bias": {LONG: "a"}}),
        (CHAT, {"response_format": {"type": LONG}}),
        (CHAT, {"response_format": {"type": [LONG]}}),
        (CHAT, {"structured_outputs": {LONG: 1}}),
        (CHAT, {"response_format": {"type": "structural_tag", **TAG}}),
        (CHAT, {"reasoning_effort": LONG}),
        (COMPLETIONS, {LONG: 1}),
        (MESSAGES, {"messages": [{"role": LONG}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (RESPONSES, {"previous_response_id": LONG}),
        (RESPONSES, {"include": [LONG]}),
        (RESPONSES, {"tool_choice": LONG}),
        (RESPONSES, {"tool_choice": {"type": LONG}}),
        (RESPONSES, {"input": [{"type": LONG}]}),
        (RESPONSES, {"input": [{"type": "item_reference", "id": LONG}]}),
        (RESPONSES, {"metadata": {LONG: 1}}),
    ],
)  # fmt: skip
def test_a_refusal_quotes_only_the_beginning(http: httpx.Client, path: str, fields: Any) -> None:
    refused = http.post(path, content=json.dumps(ASKED[path] | fields))
    assert refused.status_code in (400, 404)
    assert len(message_of(refused)) <= MAX_ERROR_CHARS + 1
    assert len(refused.content) <= 2 * MAX_ERROR_CHARS + 500


HUGE = "1" + "0" * 400
ODD_VALUES = (
    *(HUGE, f"-{HUGE}", f"[{HUGE}]", f'{{"a": {HUGE}}}', f'{{"type": "enabled", "budget_tokens": {HUGE}}}'),
    *("1e999", "NaN", "-Infinity", "1.5", "true", "[]", "{}", '""', "[[]]", "[null]", '{"a": 1, "a": {"a": 2}}'),
    *('"\\ud83d"', '["\\ud83d"]', '{"\\ud83d": "\\ud83d"}', '[{"type": "\\ud83d", "\\ud83d": [1]}]', '"\\u0000"'),
)
FIELDS: Any = {
    CHAT: (ChatCompletionBody, OPENAI_FIELDS),
    COMPLETIONS: (CompletionBody, {}),
    MESSAGES: (MessagesBody, {"metadata": None, "service_tier": None}),
    f"{MESSAGES}/count_tokens": (CountTokensBody, {}),
    RESPONSES: (ResponsesBody, RESPONSES_FIELDS),
    EMBEDDINGS: (EmbeddingBody, EMBEDDING_FIELDS),
    RERANK: (RerankBody, RERANK_FIELDS),
}


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("path", FIELDS)
def test_a_field_of_any_value_is_honoured_or_refused(http: httpx.Client, path: str, step: int) -> None:
    """Every run tries a third of the values with each field, another third with the next one."""
    wire, others = FIELDS[path]
    asked = ASKED[path if path in ASKED else MESSAGES]
    for number, name in enumerate((*wire.model_fields, *others, "\\ud83d")):
        for value in ODD_VALUES[number % step :: step]:
            start = json.dumps({key: each for key, each in asked.items() if key != name})[:-1]
            body = f'{start}{", " * (len(start) > 1)}"{name}": {value}}}'
            answer = http.post(path, content=body)
            assert answer.status_code in (200, 400, 404), f"{name}: {value}"
            assert len(answer.content) < 10_000 and (answer.status_code == 200 or message_of(answer))


@pytest.mark.parametrize("path", FIELDS)
def test_a_list_of_any_length_is_honoured_or_refused(http: httpx.Client, path: str) -> None:
    wire, _ = FIELDS[path]
    asked = ASKED[path if path in ASKED else MESSAGES]
    for name, field in wire.model_fields.items():
        if "Items[" in str(field.annotation) or "list[" in str(field.annotation):
            for item in (0, "a"):
                answer = http.post(path, content=json.dumps({**asked, name: [item] * 100_000}))
                assert answer.status_code in (200, 400), f"{name}: {item}"
                assert len(answer.content) < 10_000 and (answer.status_code == 200 or message_of(answer))


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/%ED%A0%BD", 404),
        ("/v1/responses/%ED%A0%BD", 404),
        ("/v1/responses/resp_1/input_items?limit=1" + "0" * 400, 400),
        ("/v1/responses/resp_1/input_items?limit=-1", 400),
        ("/v1/responses/resp_1/input_items?after=%ED%A0%BD", 404),
        ("/v1/responses/resp_1/input_items?order=" + LONG[:50_000], 400),
        ("/v1/responses/resp_1?stream=%ED%A0%BD", 400),
        ("/v1/status/stream?interval=nan", 400),
        ("/v1/status/stream?interval=-1", 400),
        ("/v1/status/stream?interval=1e999", 400),
        ("/v1/status/stream?interval=1" + "0" * 400, 400),
    ],
)
def test_any_path_and_query_is_refused_in_words(http: httpx.Client, path: str, status: int) -> None:
    refused = http.get(path)
    assert refused.status_code == status
    assert len(refused.content) <= 2 * MAX_ERROR_CHARS + 500 and refused.json()["error"]["message"]


@pytest.mark.parametrize("item_id", [5, None, [], "mine"])
def test_input_items_have_an_id_whatever_was_sent(http: httpx.Client, item_id: Any) -> None:
    item = {"type": "message", "role": "user", "content": "Hi.", "id": item_id}
    response = http.post(RESPONSES, content=json.dumps({"input": [item]})).json()
    listed = http.get(f"{RESPONSES}/{response['id']}/input_items").json()
    [found] = listed["data"]
    assert isinstance(found["id"], str) and listed["first_id"] == found["id"]
    assert item_id != "mine" or found["id"] == "mine"


def test_half_a_surrogate_pair_is_echoed_as_a_replacement_character(http: httpx.Client) -> None:
    body = {"input": "a\ud83d", "metadata": {"\ud83d": "b\ud83d"}, "instructions": "c\ud83d"}
    response = http.post(RESPONSES, content=json.dumps(body)).json()
    assert (response["metadata"], response["instructions"]) == ({"\ufffd": "b\ufffd"}, "c\ufffd")


def test_a_list_beyond_its_bound_is_refused_by_name(http: httpx.Client) -> None:
    refused = http.post(CHAT, content=json.dumps(ASKED[CHAT] | {"stop_token_ids": [1] * 1_001}))
    assert refused.status_code == 400 and "1000 entries" in message_of(refused)
