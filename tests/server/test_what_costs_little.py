"""What many programs send or ask for, and this server takes or answers in words."""

import logging
from typing import Any

import httpx
import pytest

from tests.support.running import eventually, serving
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart, ToolChoice

from .fakes import PROMPT_TOKENS, FakeEngine

HI: Any = {"role": "user", "content": "hi"}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FLAT: Any = [{"type": "function", "name": name} for name in ("a", "b", "c")]
NESTED: Any = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]


def test_fields_that_are_taken(http: httpx.Client) -> None:
    counted = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for fields in ({"service_tier": "priority"}, counted):
        assert http.post(CHAT, json={"messages": [HI], **fields}).status_code == 200
    for fields in ({"truncation": "auto"}, {"service_tier": "flex"}):
        assert http.post(RESPONSES, json={"input": "hi", **fields}).status_code == 200


@pytest.mark.parametrize(("mode", "names"), [("auto", ["a", "c"]), ("required", ["b"])])
def test_allowed_tools(http: httpx.Client, engine: FakeEngine, mode: Any, names: list[str]) -> None:
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    inside = [{"type": "function", "function": {"name": name}} for name in names]
    nested = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": inside}}
    told = http.post(RESPONSES, json={"input": "hi", "tools": FLAT, "tool_choice": flat}).json()
    http.post(CHAT, json={"messages": [HI], "tools": NESTED, "tool_choice": nested}).raise_for_status()
    flat["tools"] = [{"type": "function", "name": "z"}]
    assert http.post(RESPONSES, json={"input": "hi", "tools": FLAT, "tool_choice": flat}).status_code == 400
    for request in engine.requests:
        assert [tool.name for tool in request.tools] == ["a", "b", "c"], "the prompt stays the same"
        assert request.tool_choice == ToolChoice(mode, names=frozenset(names))
    assert told["tool_choice"]["mode"] == mode


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_details": [{"type": "reasoning.text", "text": "why", "signature": None}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "why", "signature": "x"}]},
        {"reasoning_content": "why", "reasoning_details": [{"type": "reasoning.text", "text": "why"}]},
        {"reasoning_details": [{"text": "why"}], "thinking_blocks": [{"thinking": "why"}]},
    ],
)
def test_reasoning_comes_back_under_other_names(http: httpx.Client, engine: FakeEngine, fields: Any) -> None:
    said = {"role": "assistant", "content": "x", **fields}
    assert http.post(CHAT, json={"messages": [HI, said, HI]}).status_code == 200
    assert engine.requests[0].messages is not None
    assert engine.requests[0].messages[1].parts[0] == ReasoningPart("why")


def test_addresses(http: httpx.Client, engine: FakeEngine) -> None:
    counted = http.post(f"{RESPONSES}/input_tokens", json={"input": "hi", "tools": FLAT})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": PROMPT_TOKENS}
    compact = http.post(f"{RESPONSES}/compact", json={"input": "hi"})
    assert compact.status_code == 404 and "summary" in compact.json()["error"]["message"]
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    for path in ("/health", "/v1/models"):
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert [request.messages for request in engine.counted] == [(Message("user", (TextPart("hi"),)),)]


def test_the_log_says_once_how_unknown_fields_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with serving(FakeEngine()) as running, running.http() as http:
        for name in ("mind", "mood"):
            assert http.post(CHAT, json={"messages": [HI], name: 1}).status_code == 400
        http.post(CHAT, json={"messages": [HI]}).raise_for_status()
        eventually(lambda: any("--unknown-fields warn" in line for line in caplog.messages))
    [said] = [line for line in caplog.messages if "--unknown-fields warn" in line]
    assert "`mind`" in said
