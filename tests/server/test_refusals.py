"""What a refusal says: in the envelope of its protocol, and short, whatever the client sent."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from vllm_mlx.api.errors import MAX_WORDS

from .fakes import FakeEngine
from .running import Running, serving

LONG = "b" * 100_000
CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
ASKED: Any = {
    CHAT: {"messages": [{"role": "user", "content": "Hi."}]},
    COMPLETIONS: {"prompt": "Hi."},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 5},
    RESPONSES: {"input": "Hi."},
}
TOOL: Any = {"type": "function", "function": {"name": "f"}}
TAG: Any = {"structures": [{"begin": LONG, "schema": {}, "end": "x"}], "triggers": ["a"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(FakeEngine()) as running:
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
        (MESSAGES, {"messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "base64", "media_type": LONG, "data": ""}}]}]}),
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
    assert len(message_of(refused)) <= MAX_WORDS + 1
    assert len(refused.content) <= 2 * MAX_WORDS + 500
