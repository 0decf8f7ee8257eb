"""Two tools of one name are refused in every protocol, and the error says where both are."""

from typing import Any

import httpx
import pytest

from .fakes import FakeEngine

ASK = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "name": "f", "parameters": {}}
NESTED = {"type": "function", "function": {"name": "f", "parameters": {}}}
CUSTOM = {"type": "custom", "name": "f"}
OTHER = {"type": "function", "name": "g", "parameters": {}}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [FUNCTION]}
ANTHROPIC = {"name": "f", "input_schema": {"type": "object"}}
CHAT, RESPONSES, MESSAGES = {"messages": ASK}, {"input": "hi"}, {"messages": ASK, "max_tokens": 5}

CASES: dict[str, tuple[str, dict[str, Any], list[Any], tuple[str, str]]] = {
    "chat": ("chat/completions", CHAT, [NESTED, OTHER, NESTED], ("tools[0].function.name", "tools[2].function.name")),
    "chat, flat": ("chat/completions", CHAT, [NESTED, FUNCTION], ("tools[0].function.name", "tools[1].name")),
    "chat, custom": ("chat/completions", CHAT, [CUSTOM, FUNCTION], ("tools[0].name", "tools[1].name")),
    "responses": ("responses", RESPONSES, [OTHER, FUNCTION, CUSTOM], ("tools[1].name", "tools[2].name")),
    "responses, a namespace": (
        "responses",
        RESPONSES,
        [NAMESPACE, {**FUNCTION, "name": "n__f"}],
        ("tools[0].tools[0].name", "tools[1].name"),
    ),
    "messages": ("messages", MESSAGES, [ANTHROPIC, ANTHROPIC], ("tools[0].name", "tools[1].name")),
    "messages, deferred": (
        "messages",
        MESSAGES,
        [ANTHROPIC, {**ANTHROPIC, "defer_loading": True}],
        ("tools[0].name", "tools[1].name"),
    ),
    "count_tokens": ("messages/count_tokens", CHAT, [ANTHROPIC, ANTHROPIC], ("tools[0].name", "tools[1].name")),
}


@pytest.mark.parametrize("name", CASES)
def test_two_tools_of_one_name_are_refused(http: httpx.Client, engine: FakeEngine, name: str) -> None:
    path, body, tools, (first, second) = CASES[name]
    answer = http.post(f"/v1/{path}", json={**body, "tools": tools})
    assert answer.status_code == 400 and f"`{first}` and `{second}`" in answer.json()["error"]["message"]
    assert answer.json()["error"].get("param", second) == second
    assert not engine.requests
    assert http.post(f"/v1/{path}", json={**body, "tools": tools[:1]}).status_code == 200


def test_one_name_in_two_namespaces_is_two_tools(http: httpx.Client, engine: FakeEngine) -> None:
    tools = [NAMESPACE, {**NAMESPACE, "name": "m"}, FUNCTION]
    assert http.post("/v1/responses", json={"input": "hi", "tools": tools}).status_code == 200
    assert [tool.name for tool in engine.requests[-1].tools] == ["n__f", "m__f", "f"]
