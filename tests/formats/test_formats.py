"""What each way of writing reasoning and calls means, at every cut."""

import pytest

from tests.support.rows import row
from vllm_mlx.core.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

from .support import MARKERS, TOOLS, as_special, cuts, run

Text, Reasoning = TextDelta, ReasoningDelta


def call(name: str, arguments: str, index: int = 0) -> list:
    return [ToolCallStart(index, f"c{index}", name), ToolCallDelta(index, arguments), ToolCallEnd(index)]


def open_call(name: str, arguments: str = "") -> list:
    return [ToolCallStart(0, "c0", name), *([ToolCallDelta(0, arguments)] if arguments else [])]


def broken(name: str, arguments: str) -> list:
    """A call that was announced and cannot be read: its text follows."""
    return [*call(name, arguments)[:2], ToolCallEnd(0, is_broken=True)]


WEATHER_JSON = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
WEATHER_XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
WEATHER = '{"city": "Rome", "days": 2}'

# Both modes agree on these: markers as text, and markers as special pieces.
WELL_FORMED = {
    "plain": ("Hi  there\n", [Text("Hi  there\n")]),
    "white space around a text is kept": ("  \n a \n", [Text("  \n a \n")]),
    "white space alone is content": (" \n", [Text(" \n")]),
    "reasoning then text": ("<think>\nhm\n</think>\n\nHi", [Reasoning("hm"), Text("Hi")]),
    "reasoning without line breaks": ("<think>hm</think>Hi", [Reasoning("hm"), Text("Hi")]),
    "white space inside reasoning is kept": (
        "<think>\n\n  a\n\nb \n\n</think>c",
        [Reasoning("\n  a\n\nb \n"), Text("c")],
    ),
    "empty reasoning": ("<think>\n\n</think>\n\nHi", [Text("Hi")]),
    "empty reasoning before a call": (f"<think>\n\n</think>\n\n{WEATHER_JSON}", call("get_weather", WEATHER)),
    "indented text after reasoning": ("<think>a</think>\n\n  code", [Reasoning("a"), Text("  code")]),
    "two closing tags": ("<think>a</think>\n</think>\n\nb", [Reasoning("a"), Text("b")]),
    "closing tag without reasoning": ("</think>\n\nb", [Text("b")]),
    "opening tag twice": ("<think><think>\na</think>b", [Reasoning("a"), Text("b")]),
    "reasoning twice": ("<think>a</think>b<think>c</think>\nd", [Reasoning("a"), Text("b"), Reasoning("c"), Text("d")]),
    "unfinished reasoning": ("<think>\na\n", [Reasoning("a\n")]),
    "json call": (WEATHER_JSON, call("get_weather", WEATHER)),
    "xml call": (WEATHER_XML, call("get_weather", WEATHER)),
    "text before and after": (
        f"One.\n{WEATHER_JSON}\nTwo.",
        [Text("One.\n"), *call("get_weather", WEATHER), Text("\nTwo.")],
    ),
    "reasoning, text, two calls": (
        f"<think>\na\n</think>\n\nb\n\n{WEATHER_XML}\n{WEATHER_JSON}\n",
        [Reasoning("a"), Text("b\n\n"), *call("get_weather", WEATHER), *call("get_weather", WEATHER, 1)],
    ),
    "calls without space between": (
        WEATHER_JSON + WEATHER_XML,
        [*call("get_weather", WEATHER), *call("get_weather", WEATHER, 1)],
    ),
    "call inside unfinished reasoning": (
        f"<think>\nlet me\n\n{WEATHER_XML}",
        [Reasoning("let me\n"), *call("get_weather", WEATHER)],
    ),
    "reasoning that goes on behind a call": (
        f"<think>a{WEATHER_JSON}\nso{WEATHER_JSON} b</think>\n\nc",
        [
            *(Reasoning("a"), *call("get_weather", WEATHER), Reasoning("so")),
            *(*call("get_weather", WEATHER, 1), Reasoning("b"), Text("c")),
        ],
    ),
    "reasoning that goes on behind a call and has no end": (
        f"<think>a{WEATHER_JSON}\nb",
        [Reasoning("a"), *call("get_weather", WEATHER), Reasoning("b")],
    ),
    "two runs of reasoning": ("<think>a</think>\n<think>b</think>c", [Reasoning("a\nb"), Text("c")]),
    "reasoning closed behind a call": (
        f"<think>a{WEATHER_JSON}</think>b",
        [Reasoning("a"), *call("get_weather", WEATHER), Text("b")],
    ),
    "arguments before the name": (
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>',
        call("get_weather", '{"city": "Rome"}'),
    ),
    "parameters instead of arguments": (
        '<tool_call>{"name":"get_weather","parameters":{"city":"Rome"}}</tool_call>',
        call("get_weather", '{"city":"Rome"}'),
    ),
    "arguments as a string": (
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Ro\\\\nme\\"}"}</tool_call>',
        call("get_weather", '{"city": "Ro\\nme"}'),
    ),
    "calls in the tag of the tools": (
        '<tools>\n{"name": "write", "arguments": {"text": "a"}}\n{"name": "now", "arguments": {}}\n</tools>',
        [*call("write", '{"text": "a"}'), *call("now", "{}", 1)],
    ),
    "tools that are listed": (
        '<tools>\n{"type": "function", "function": {"name": "now", "parameters": {}}}\n</tools>',
        [Text('<tools>\n{"type": "function", "function": {"name": "now", "parameters": {}}}\n</tools>')],
    ),
    "text about the tag of the tools": ("See <tools> {json} </tools>.", [Text("See <tools> {json} </tools>.")]),
    "one brace too many": (
        '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call> ok',
        [*call("now", "{}"), Text(" ok")],
    ),
    "an id that the model wrote": (
        '<tool_call>{"id": "call_7", "name": "now", "arguments": {}}</tool_call>',
        [ToolCallStart(0, "call_7", "now"), *call("now", "{}")[1:]],
    ),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', call("now", "{}")),
    "null arguments": ('<tool_call>{"name": "now", "arguments": null}</tool_call>', call("now", "{}")),
    "no xml arguments": ("<tool_call><function=now></function></tool_call>", call("now", "{}")),
    "nested arguments": (
        '<tool_call>{"name": "write", "arguments": {"tags": [{"a": [1, {}]}, null, -1.5e3], "x": {"y": true}}}\n'
        "</tool_call>",
        call("write", '{"tags": [{"a": [1, {}]}, null, -1.5e3], "x": {"y": true}}'),
    ),
    "other keys of a call": (
        '<tool_call>{"id": [1, "x"], "name": "now", "arguments": {}, "type": "function"}</tool_call>',
        call("now", "{}"),
    ),
    "unicode": (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "東京 🙂 \\u00e9 \\"q\\" \\\\"}}</tool_call>',
        call("get_weather", '{"city": "東京 🙂 \\u00e9 \\"q\\" \\\\"}'),
    ),
    "missing closing brace": (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}\n</tool_call>',
        call("get_weather", '{"city": "Rome"}'),
    ),
    "missing closing tag between calls": (
        '<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now"}\n</tool_call>',
        [*call("now", "{}"), *call("now", "{}", 1)],
    ),
    "missing closing tag at the end": ('<tool_call>{"name": "now", "arguments": {}}', call("now", "{}")),
    "missing function close": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</tool_call>ok",
        [*call("get_weather", '{"city": "Rome"}'), Text("ok")],
    ),
    "missing parameter close": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n2\n</function>\n</tool_call>",
        call("get_weather", WEATHER),
    ),
    "missing everything but the end": (
        "<tool_call>\n<function=write>\n<parameter=text>\nRome\n</tool_call>",
        call("write", '{"text": "Rome"}'),
    ),
    "missing opening tag": (
        WEATHER_XML.removeprefix("<tool_call>\n") + "\n",
        call("get_weather", WEATHER),
    ),
    "xml value keeps its own lines and tags": (
        "<tool_call><function=write><parameter=text>\n\n<b>1 < 2</b> </parameter> | <parameter=text> </function>\n\n\n"
        "</parameter></function></tool_call>",
        call("write", '{"text": "\\n<b>1 < 2</b> </parameter> | <parameter=text> </function>\\n\\n"}'),
    ),
    "empty xml values": (
        "<tool_call><function=write><parameter=path></parameter><parameter=text>\n</parameter></function></tool_call>",
        call("write", '{"path": "", "text": ""}'),
    ),
    "string values are never decoded": (
        "<tool_call><function=write><parameter=path>42</parameter><parameter=text>\n"
        '{"a": null}\n</parameter></function></tool_call>',
        call("write", '{"path": "42", "text": "{\\"a\\": null}"}'),
    ),
    "undeclared tool": (
        f'a<tool_call>{{"name": "rm", "arguments": {{"x": "</b>"}}}}\n</tool_call> b {WEATHER_JSON}',
        [
            Text('a\n{"name": "rm", "arguments": {"x": "</b>"}} b '),
            *call("get_weather", WEATHER),
        ],
    ),
    "undeclared xml tool": (
        WEATHER_XML.replace("get_weather", "rm"),
        [Text('{"name": "rm", "arguments": {"city": "Rome", "days": 2}}')],
    ),
    "undeclared tool in reasoning": (
        '<think>a <tool_call>{"name": "rm"}</tool_call> b</think>c',
        [Reasoning('a <tool_call>{"name": "rm"}</tool_call> b'), Text("c")],
    ),
    "no call at all": ("<tool_call>\nnot a call</tool_call>.", [Text("not a call.")]),
    "no call, but quoted": (
        "`<tool_call>` is written, and `</tool_call>`.",
        [Text("`<tool_call>` is written, and `</tool_call>`.")],
    ),
    "no call, in a code block": (
        '```\n<tool_call>\n{"name": "rm"}\n</tool_call>\n```\n<tool_call></tool_call>',
        [Text('```\n<tool_call>\n{"name": "rm"}\n</tool_call>\n```\n')],
    ),
    "tags between words": (
        "The <tool_call> tag ends with </tool_call>.",
        [Text("The <tool_call> tag ends with </tool_call>.")],
    ),
    "an empty block": ("a<tool_call>\n</tool_call>b", [Text("ab")]),
    "an empty object in tags": ("<tool_call>{}</tool_call>b", [Text("b")]),
    "a closing tag alone": ("Done.</tool_call>\n", [Text("Done.\n")]),
    "no call in reasoning": ("<think>a <tool_call> tag</think>b", [Reasoning("a <tool_call> tag"), Text("b")]),
    "no call, then one": (
        f"<tool_call> <tool_call>{WEATHER_JSON.removeprefix('<tool_call>')}",
        call("get_weather", WEATHER),
    ),
    "name is no string": ('<tool_call>{"name": 3}</tool_call>', [Text('{"name": 3}')]),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', [Text('{"arguments": {}}')]),
    "arguments are no object": (
        '<tool_call>{"arguments": [1], "name": "now"}</tool_call>',
        [Text('{"arguments": [1], "name": "now"}')],
    ),
    "broken behind the name": (
        '<tool_call>{"name": "now", "arguments": {"a": bad}}</tool_call>.',
        [*broken("now", "{}"), Text('{"name": "now", "arguments": {"a": bad}}.')],
    ),
    "cut in the name": ('<tool_call>{"name": "get_wea', [Text('{"name": "get_wea')]),
    "cut behind the name": ('<tool_call>{"name": "now", "argu', open_call("now")),
    "cut in a json string": (
        '<tool_call>{"name": "write", "arguments": {"path": "/a", "text": "x\\ny',
        open_call("write", '{"path": "/a", "text": "x\\ny'),
    ),
    "cut in a json number": ('<tool_call>{"name": "now", "arguments": {"a": 12', open_call("now", '{"a": 12')),
    "cut in arguments as a string": (
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1',
        open_call("now", '{"a": 1'),
    ),
    "cut in an xml string": (
        "<tool_call><function=write><parameter=path>\n/a\n</parameter><parameter=text>\nx\ny\n",
        open_call("write", '{"path": "/a", "text": "x\\ny\\n'),
    ),
    "cut in an xml number": (
        "<tool_call><function=get_weather><parameter=days>\n12",
        open_call("get_weather", '{"days": 12'),
    ),
    "cut behind an xml value": (
        "<tool_call><function=get_weather><parameter=city>\nRome\n</parameter>\n",
        open_call("get_weather", '{"city": "Rome"'),
    ),
}

# Markers as text only: here a tag inside a string is data because of where it stands.
TEXTUAL = {
    "marker in a json string": (
        '<tool_call>{"name": "write", "arguments": {"text": "</tool_call> <think>"}}</tool_call>',
        call("write", '{"text": "</tool_call> <think>"}'),
    ),
    "marker in an xml value": (
        "<tool_call><function=write><parameter=text>\na </tool_call> <tool_call> b\n"
        "</parameter></function></tool_call>",
        call("write", '{"text": "a </tool_call> <tool_call> b"}'),
    ),
    "tail that may become a marker": ("a <tool_cal", [Text("a <tool_cal")]),
    "tail in reasoning": ("<think>a </thin", [Reasoning("a </thin")]),
    "half marker before a marker": ("<think>a</thi</think>b", [Reasoning("a</thi"), Text("b")]),
    "less-than signs": ("1 < 2 <<think>a</think>", [Text("1 < 2 <"), Reasoning("a")]),
}


@pytest.mark.parametrize("name", [*WELL_FORMED, *TEXTUAL])
def test_events_at_every_cut(name: str) -> None:
    text, expected = {**WELL_FORMED, **TEXTUAL}[name]
    for pieces in cuts(text):
        assert run(pieces, tool_specs=TOOLS) == expected, pieces


@pytest.mark.parametrize("name", WELL_FORMED)
def test_special_pieces_mean_the_same(name: str) -> None:
    text, expected = WELL_FORMED[name]
    pieces = as_special(text)
    by_character = [part for piece, special in pieces for part in ([(piece, True)] if special else list(piece))]
    for marked in (pieces, by_character):
        assert run(marked, tool_specs=TOOLS, marker_tokens=frozenset(MARKERS)) == expected


@row("S4-16")
@pytest.mark.parametrize("tools", ["hermes", "qwen3_json", "qwen3_xml", "qwen3_coder"])
@pytest.mark.parametrize("text", [WEATHER_JSON, WEATHER_XML])
def test_every_name_takes_both_bodies(tools: str, text: str) -> None:
    assert run([text], tools=tools, tool_specs=TOOLS) == call("get_weather", WEATHER)
