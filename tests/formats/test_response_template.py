"""The rules that checkpoints carry: which formats they mean, and what those read."""

import json
from typing import Any

import pytest

from vllm_mlx.core.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from vllm_mlx.formats.response_template import UnreadableTemplate, read_response_template

from .support import cuts, run, tool

TOOLS = [tool("get_weather", city={"type": "string"}, days={"type": "integer"}), tool("now")]
ROME = {"city": "Rome", "days": 2}
WRITTEN = json.dumps(ROME)
THINK = {"open": "<think>", "close": "</think>", "content": "text"}
CALL = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
XML = "<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"

# The fields of a template, and a reply that reasons "hm" and calls get_weather(ROME).
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3": (
        {
            "reasoning_content": THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": CALL,
            },
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
        },
        f'<think>\nhm\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WRITTEN}}}\n</tool_call>',
    ),
    "qwen3.5": (
        {
            "thinking": THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
                "transform": NAMED,
            },
        },
        f"<think>\nhm\n</think>\n\n<tool_call>\n<function=get_weather>\n{XML}</function>\n</tool_call>",
    ),
    "glm": (
        {
            "reasoning_content": THINK,
            "tool_calls": {
                "open_pattern": r"<tool_call>(?P<name>\w+)",
                "close": "</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                },
                "transform": NAMED,
            },
        },
        "<think>hm</think><tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    "gemma4": (
        {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": NAMED,
            },
        },
        '<|channel>thought\nhm\n<channel|><|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
    ),
    "command": (
        {
            "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>", "content": "text"},
            "tool_calls": {
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            },
        },
        "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n"
        f'{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {WRITTEN}}}\n]<|END_ACTION|>',
    ),
    "gpt-oss": (
        {
            "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
                "close": "<|call|>",
                "content": "json",
                "transform": NAMED,
            },
        },
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{WRITTEN}<|call|>",
    ),
    "tags of its own, JSON": (
        {
            "reasoning": {"open": ["<muse>", "<mull>"], "close": ["</muse>", "</mull>"], "content": "text"},
            "tool_calls": {
                "open": "<do>",
                "close": "</do>",
                "content": "json",
                "transform": {"function": {"name": "{content.name}", "arguments": "{content.args}"}},
            },
        },
        f'<mull>hm</mull><do>{{"name": "get_weather", "args": {WRITTEN}}}</do>',
    ),
    "tags of its own, in patterns": (
        {
            "reasoning": {"open_pattern": r"\s*(?:<muse>|<mull>)\n", "close_pattern": r"(?:</muse>|</mull\>)"},
            "tool_calls": {"open_pattern": r"(?:^|\n)<do>", "close": "</do>", "content": "json", "transform": CALL},
        },
        f'<mull>hm</mull><do>{{"name": "get_weather", "arguments": {WRITTEN}}}</do>',
    ),
    "tags of its own, a name before JSON": (
        {
            "reasoning": {"open_pattern": r"(?:^|<muse>\s*)", "close_pattern": r"\n?</muse>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"<do>\s*run=(?P<name>[\w.]{1,64})\s*with",
                "close": "</do>",
                "content": "json",
                "transform": NAMED,
            },
        },
        f"<muse>hm</muse><do>\nrun=get_weather with {WRITTEN}</do>",
    ),
    "tags of its own, a tag for each argument": (
        {
            "reasoning": {"open": "<muse>", "close": "</muse>"},
            "tool_calls": {
                "open_pattern": r"<do>(?P<name>\w+)",
                "close": "</do>",
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<a k=(?P<key>\w+)>(?P<value>.*?)</a>"},
                "transform": NAMED,
            },
        },
        "<muse>hm</muse><do>get_weather\n<a k=city>Rome</a>\n<a k=days>2</a>\n</do>",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reply_is_read_by_the_rules_of_its_checkpoint(name: str) -> None:
    fields, text = CASES[name]
    rules = read_response_template({"start_anchor": "<|im_start|>assistant\n", "fields": fields})
    for pieces in cuts(text):
        events = run(pieces, reasoning=rules.reasoning, tools=rules.calls, tool_specs=TOOLS)
        assert events[0] == ReasoningDelta("hm"), pieces
        assert events[1] == ToolCallStart(0, "0" if name == "command" else "c0", "get_weather")  # the model's own id
        assert isinstance(events[2], ToolCallDelta)
        assert json.loads(events[2].arguments) == ROME
        assert events[3:] == [ToolCallEnd(0)]
    undeclared = run(
        [text.replace("get_weather", "rm")], reasoning=rules.reasoning, tools=rules.calls, tool_specs=TOOLS
    )
    assert undeclared[0] == ReasoningDelta("hm")
    assert isinstance(undeclared[1], TextDelta)
    assert json.loads(undeclared[1].text) == {"name": "rm", "arguments": ROME}


def test_parts_that_the_rules_leave_out_are_none() -> None:
    rules = read_response_template({"fields": {"content": {"close": "</s>", "content": "text"}}})
    assert rules.reasoning is None
    assert rules.calls is None


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("<think>", "no `fields`"),
        ({"fields": {"reasoning": {"open_pattern": "<think>\\", "close": "</think>"}}}, "more than text"),
        ({"fields": {"reasoning": {"open": 5, "close": "</think>"}}}, "neither a text nor a list"),
        ({"fields": {"tool_calls": {"open_pattern": r"\s*"}}}, "no opening tag"),
        ({"fields": {"tool_calls": {"open": "\n", "content": "json"}}}, "no opening tag"),
        ({"version": 2, "fields": {}}, "version"),
        ({"fields": {"thinking": "<think>"}}, "not an object"),
        ({"fields": {"thinking": {"close": "</think>"}}}, "no opening"),
        ({"fields": {"tool_calls": {"close": "</do>"}}}, "no opening tag"),
        ({"fields": {"tool_calls": {"open": "<do>", "content": "kv-lines"}}}, "kv-lines"),
        ({"fields": {"tool_calls": {"open_pattern": "(?=<do>)", "content": "json"}}}, "more than text"),
        ({"fields": {"tool_calls": {"open_pattern": "x" * 2000, "content": "json"}}}, "longer"),
        (
            {
                "fields": {
                    "tool_calls": {
                        "open": "<do>",
                        "content": "json",
                        "transform": {"function": {"name": "{fn}", "arguments": "{with}"}},
                    }
                }
            },
            "keys",
        ),
        ({"fields": {"tool_calls": {"open_pattern": r"<do>(?P<name>\w+)", "content": "xml-inline"}}}, "around key"),
    ],
)
def test_rules_that_cannot_be_followed_say_why(template: Any, words: str) -> None:
    with pytest.raises(UnreadableTemplate, match=words):
        read_response_template(template)
