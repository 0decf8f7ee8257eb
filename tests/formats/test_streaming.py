"""What a client sees while the text is still growing, and what that costs."""

import sys
import time

import pytest

from tests.support.named_formats import OutputParser
from tests.support.rows import row
from vllm_mlx.core.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

from .support import MARKERS, TOOLS, run, schemas_of


def feed(*pieces: str, **options):
    parser = OutputParser("qwen3", "hermes", schemas=schemas_of(TOOLS), call_ids=lambda: "c", **options)
    return [parser.feed(piece) for piece in pieces]


def test_text_leaves_at_once_and_a_possible_marker_is_held() -> None:
    assert feed("Hi", " <thin", "g", "> a <tool_call") == [
        [TextDelta("Hi")],
        [TextDelta(" ")],
        [TextDelta("<thing")],
        [TextDelta("> a ")],
    ]


@row("S4-15")
def test_json_call_streams() -> None:
    assert feed('<tool_call>{"name": "write"', ', "arguments": {"text": "a', "b", '"}', "}") == [
        [ToolCallStart(0, "c", "write")],
        [ToolCallDelta(0, '{"text": "a')],
        [ToolCallDelta(0, "b")],
        [ToolCallDelta(0, '"}')],
        [ToolCallEnd(0)],
    ]


def test_xml_call_streams_strings_and_holds_other_values() -> None:
    pieces = (
        "<tool_call><function=get_weather>",
        "\n<parameter=",
        "city>R",
        "o\nm",
        "e\n</parameter><parameter=days>\n1",
        "2",
    )
    assert feed(*pieces, "</parameter></function>") == [
        [],
        [ToolCallStart(0, "c", "get_weather")],
        [ToolCallDelta(0, '{"city": "R')],
        [ToolCallDelta(0, "o\\nm")],
        [ToolCallDelta(0, 'e", "days": ')],
        [],
        [ToolCallDelta(0, "12}"), ToolCallEnd(0)],
    ]


def test_a_json_block_of_kimi_k3_streams() -> None:
    parser = OutputParser(None, "kimi_k3", schemas=schemas_of(TOOLS), call_ids=lambda: "c")
    call = '<|open|>call tool="write" index="1"<|sep|><|open|>json type="object"<|sep|>'
    pieces = (call, '{"text": "a', "b", '", "n": [1', ", 2]", "}", "<|close|>json<|sep|>", "<|close|>call<|sep|>")
    assert [parser.feed(piece) for piece in pieces] == [
        [ToolCallStart(0, "c", "write")],
        [ToolCallDelta(0, '{"text": "a')],
        [ToolCallDelta(0, "b")],
        [ToolCallDelta(0, '", "n": [')],
        [ToolCallDelta(0, "1, 2]")],
        [],
        [],
        [ToolCallDelta(0, "}"), ToolCallEnd(0)],
    ]


def test_text_of_an_undeclared_call_streams() -> None:
    assert feed('<tool_call>{"name": "rm', '"', ', "arguments": {', "}}</tool_call>") == [
        [],
        [],
        [TextDelta('{"name": "rm", "arguments": {')],
        [TextDelta("}"), TextDelta("}")],
    ]


def test_without_declared_tools_any_name_is_a_call() -> None:
    events = run(['<tool_call>{"name": "rm"}</tool_call>'])
    assert [type(event) for event in events] == [ToolCallStart, ToolCallDelta, ToolCallEnd]


def test_markers_that_are_tokens_are_data_as_text() -> None:
    text = "<think>a</think> <tool_call>{}</tool_call>"
    assert run([text], marker_tokens=frozenset(MARKERS)) == [TextDelta(text)]


def test_a_marker_token_inside_a_json_string_ends_the_call() -> None:
    pieces = [("<tool_call>", True), '{"name": "write", "arguments": {"text": "a', ("</tool_call>", True), "b"]
    events = run(pieces, tool_specs=TOOLS, marker_tokens=frozenset(MARKERS))
    assert events[-1] == TextDelta('{"name": "write", "arguments": {"text": "ab')


def test_a_reasoning_tag_inside_arguments_is_data() -> None:
    pieces = [("<tool_call>", True), '{"name": "write", "arguments": {"text": "', ("</think>", True), '"}}']
    events = run(pieces, tool_specs=TOOLS, marker_tokens=frozenset(MARKERS))
    assert events[1:] == [ToolCallDelta(0, '{"text": "</think>"}'), ToolCallEnd(0)]


def test_a_reasoning_tag_ends_what_only_looked_like_a_call() -> None:
    pieces = [("<think>", True), "a ", ("<tool_call>", True), " {", ("</think>", True), "b"]
    events = run(pieces, tool_specs=TOOLS, marker_tokens=frozenset(MARKERS))
    assert events == [ReasoningDelta("a <tool_call> {"), TextDelta("b")]


def test_reply_that_starts_inside_reasoning() -> None:
    assert run(["a\n</think>\n\nb"], starts_in_reasoning=True) == [ReasoningDelta("a"), TextDelta("b")]
    assert run(["\na</think>b"], reasoning="deepseek_r1") == [ReasoningDelta("a"), TextDelta("b")]
    assert run(["a", "b"], starts_in_reasoning=True) == [ReasoningDelta("ab")]


@row("S1-1")
@pytest.mark.parametrize(
    ("starts", "states"),
    [
        (False, {"a": False, "<think>": True, "b": True, "</think>": False, "c": False}),
        (True, {"a": True, "</think>": False, "b": False}),
        (False, {"<think>": True, "a": True, "<think> ": True, "</think>": True, "c": True, "</think> ": False}),
        (True, {"<think>": True, "a": True, "</think>": False}),
        (False, {"<think>": True, "<tool_call>": True, '{"name": "now"': False}),
    ],
)
def test_in_reasoning_counts_nested_reasoning(starts: bool, states: dict[str, bool]) -> None:
    """`states` behind each piece. An opening tag inside reasoning needs a closing tag of its own."""
    parser = OutputParser("qwen3", "hermes", starts_in_reasoning=starts)
    for piece, state in states.items():
        parser.feed(piece)
        assert parser.in_reasoning is state, piece


def test_call_ids_are_unique() -> None:
    events = [event for _ in range(50) for event in run_with_own_ids()]
    ids = [event.call_id for event in events if isinstance(event, ToolCallStart)]
    assert len(set(ids)) == 50
    assert all(call_id.startswith("call_") and len(call_id) == 29 for call_id in ids)


def run_with_own_ids():
    parser = OutputParser("qwen3", "hermes")
    return parser.feed('<tool_call>{"name": "f"}')


def test_without_formats_all_is_text() -> None:
    text = " <think>a</think><tool_call>"
    assert run(list(text), reasoning=None, tools=None) == [TextDelta(text)]


@row("S4-30")
def test_plain_text_takes_no_more_calls_with_tools_than_without() -> None:
    def num_calls(tools: str | None) -> int:
        parser = OutputParser("qwen3", tools, schemas=schemas_of(TOOLS if tools else ()))
        parser.feed("a ")
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        events = [parser.feed(piece) for piece in ("some ", "text, ", "and 1 > 0. ") * 10]
        sys.setprofile(None)
        assert all(len(each) == 1 for each in events), "nothing is held back"
        return calls

    assert num_calls("hermes") == num_calls(None)


@pytest.mark.parametrize(
    "opening",
    [
        "",
        "<think>",
        '<tool_call>{"name": "write", "arguments": {"text": "',
        '<tool_call>{"name": "rm", "arguments": {"text": "',
        "<tool_call><function=write><parameter=text>",
        "<tool_call><function=write><parameter=tags>[",
    ],
)
def test_cost_of_a_piece_does_not_grow(opening: str) -> None:
    def seconds(num_pieces: int) -> float:
        parser = OutputParser("qwen3", "hermes", schemas=schemas_of(TOOLS))
        parser.feed(opening)
        start = time.process_time()
        for _ in range(num_pieces):
            parser.feed("word")
        return time.process_time() - start

    short, long = (min(seconds(num_pieces) for _ in range(3)) for num_pieces in (2_000, 20_000))
    assert long < 40 * short  # 10 times where the cost is constant, 100 where it grows
