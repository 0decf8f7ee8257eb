"""Names that only a declaration tells from other text: with a prefix of their own, or with odd characters."""

from typing import Any

import pytest

from vllm_mlx.core.events import ToolCallStart

from .support import cuts, run, tool

BEHIND_PREFIX = {
    "hermes": '<tool_call>\n{"name": "@", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "@", "parameters": {}}',
    "kimi_k2": "<|tool_call_begin|>@:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "deepseek_v31": "<｜tool▁call▁begin｜>@<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "openai": "<|channel|>commentary to=@ <|constrain|>json<|message|>{}<|call|>",
}
EXPRESSIONS = {
    "lfm2": "<|tool_call_start|>[@(a=1)]<|tool_call_end|>",
    "gemma4": "<|tool_call>call:@{a:1}<tool_call|>",
    "pythonic": "[@(a=1)]",
    "olmo3": "<function_calls>@(a=1)</function_calls>",
}


def called(pieces: list[str], tools: str, specs: list[dict[str, Any]]) -> list[str]:
    events = run(pieces, reasoning=None, tools=tools, tool_specs=specs)
    return [event.name for event in events if isinstance(event, ToolCallStart)]


@pytest.mark.parametrize("tools", BEHIND_PREFIX)
def test_a_prefix_is_dropped_unless_a_tool_is_declared_with_it(tools: str) -> None:
    def name_of(written: str, *declared: str) -> list[str]:
        return called([BEHIND_PREFIX[tools].replace("@", written)], tools, [tool(name) for name in declared])

    assert name_of("functions.exec", "exec") == name_of("exec", "exec") == ["exec"]
    assert name_of("functions.exec", "functions.exec") == ["functions.exec"]
    assert name_of("functions.functions.exec", "functions.exec") == ["functions.exec"]
    assert name_of("functions.exec", "read") == []


@pytest.mark.parametrize("name", ["server:tool", "a/b", "e\u0301t", "a b", "1st", "$"])
@pytest.mark.parametrize("tools", EXPRESSIONS)
def test_a_declared_name_of_an_expression_may_have_any_characters(tools: str, name: str) -> None:
    text = EXPRESSIONS[tools].replace("@", name)
    specs = [tool("other"), tool(name, a={})]
    for pieces in cuts(text):
        assert called(pieces, tools, specs) == [name]
    assert called([text], tools, [tool("other"), tool("a")]) == []
