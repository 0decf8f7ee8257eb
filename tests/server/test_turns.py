"""A template that takes less than the API allows, over HTTP: the conversation is served, and the receipt says how."""

from typing import Any

import httpx
import pytest

from tests.prompt.needs import NEEDS

SCHEMA: Any = {"type": "object", "properties": {"path": {"type": "string"}}}
CHAT: Any = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
MESSAGE: Any = {
    "max_tokens": 4,
    "tools": [{"name": "read_file", "input_schema": SCHEMA}],
    "messages": [
        {"role": "user", "content": "read a"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "read_file", "input": {"path": "a"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "x"},
                {"type": "text", "text": "be brief"},
            ],
        },
    ],
}
RESPONSE: Any = {
    "max_output_tokens": 16,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "cwd"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    ],
}


MODEL = "qwen3"
SETTINGS = {"chat_template": NEEDS["alternation"], "tool_call_parser": "hermes", "max_model_len": 512}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGE), ("/v1/responses", RESPONSE)]
)
def test_turns_out_of_order_are_served_and_the_receipt_names_the_rule(http: httpx.Client, path: str, body: Any) -> None:
    for _ in range(2):  # from the cache, too
        answer = http.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        assert 'template="order of turns"' in answer.headers["x-cache-receipt"]


def test_a_conversation_that_is_taken_has_no_rule_in_its_receipt(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "tiny", **CHAT, "messages": CHAT["messages"][:1]})
    assert "template" not in answer.headers["x-cache-receipt"]


def test_the_status_says_what_the_template_needs(http: httpx.Client) -> None:
    assert http.get("/v1/status").json()["model_facts"]["template_needs"] == ["order of turns"]


def test_tokens_are_counted_of_the_same_prompt(http: httpx.Client) -> None:
    counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", **MESSAGE, "max_tokens": None})
    usage = http.post("/v1/messages", json={"model": "tiny", **MESSAGE}).json()["usage"]
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
