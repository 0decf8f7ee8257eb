"""Tools that the chat template does not show are refused by name, in every protocol and before any output."""

from typing import Any

import httpx
import pytest

from tests.prompt.template_variants import TEMPLATE_VARIANTS

HI: Any = [{"role": "user", "content": "hi get_weather"}]
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: Any = {"name": "get_weather", "parameters": PARAMETERS}
CHAT: Any = {"messages": HI, "max_tokens": 4, "tools": [{"type": "function", "function": FUNCTION}]}
MESSAGE: Any = {"messages": HI, "max_tokens": 4, "tools": [{"name": "get_weather", "input_schema": PARAMETERS}]}
COUNTED: Any = {"messages": HI, "tools": MESSAGE["tools"]}
RESPONSE: Any = {"input": "hi", "max_output_tokens": 16, "tools": [{"type": "function", **FUNCTION}]}
NONE: Any = {"/v1/messages": {"type": "none"}}


MODEL = "qwen3"
TEMPLATE = "".join(TEMPLATE_VARIANTS["gemma"].partition("{{- bos_token")[1:])
SETTINGS = {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "max_model_len": 512}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}),
        ("/v1/messages", MESSAGE),
        ("/v1/messages", {**MESSAGE, "stream": True, "tool_choice": {"type": "any"}}),
        ("/v1/messages/count_tokens", COUNTED),
        ("/v1/responses", RESPONSE),
        ("/v1/responses", {**RESPONSE, "stream": True, "tool_choice": {"type": "function", "name": "get_weather"}}),
    ],
)
def test_they_are_refused_by_name(http: httpx.Client, path: str, body: Any) -> None:
    answer = http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "`tools`" in error["message"] and "--chat-template" in error["message"]
    assert error.get("param", "tools") == "tools"


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGE), ("/v1/responses", RESPONSE)]
)
def test_tools_that_may_not_be_called_and_no_tools_are_served(http: httpx.Client, path: str, body: Any) -> None:
    without = {name: value for name, value in body.items() if name != "tools"}
    usages = []
    for sent in ({**body, "tool_choice": NONE.get(path, "none")}, without):
        answer = http.post(path, json={"model": "tiny", "temperature": 0, **sent})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        usages.append(usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))
    assert usages[0] == usages[1]
