"""Every family's reasoning: whole, at every cut, every character alone, and with their tags as tokens."""

import itertools
import json
from typing import Any

import pytest

from tests.support.named_formats import OutputParser
from tests.support.rows import row
from vllm_mlx.core.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

from .support import REASONING, REASONING_FORMATS, as_special, cuts, run, tool

Text, Reasoning = TextDelta, ReasoningDelta
TOOLS = [tool("f", a={"type": "string"}), tool("g")]
ATOMS = (
    "<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<|open|>", "<|close|>", "<|sep|>",
    "<|START_THINKING|>", "<|END_THINKING|>", "<|message_model|>", "<|content_thinking|>", "<|end_message|>",
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|eom|>", "<seed:think>", "</seed:think>",
    "<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<ifm|think_fast>", "</ifm|think_fast>",
)  # fmt: skip


def check(name: str, text: str, expected: list[Any], *, tools: str | None = None, **options: Any) -> None:
    for pieces in cuts(text):
        assert run(pieces, reasoning=name, tools=tools, tool_specs=TOOLS, **options) == expected, pieces
    special = as_special(text, ATOMS)
    by_character = [part for piece, token in special for part in ([(piece, True)] if token else list(piece))]
    for pieces in (special, by_character):
        known = frozenset(ATOMS)
        assert run(pieces, reasoning=name, tools=tools, tool_specs=TOOLS, marker_tokens=known, **options) == expected


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_then_answer(name: str) -> None:
    open, close = REASONING[name]
    check(name, f"{open}東京 <b> 1 < 2\n\nx{close}Hi", [Reasoning("東京 <b> 1 < 2\n\nx"), Text("Hi")])
    check(name, f"{open}\na\n{close}\n\nHi \n", [Reasoning("a"), Text("Hi \n")])


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_that_the_prompt_opened(name: str) -> None:
    _, close = REASONING[name]
    check(name, f"a{close}Hi", [Reasoning("a"), Text("Hi")], starts_in_reasoning=True)
    check(name, "a\nb", [Reasoning("a\nb")], starts_in_reasoning=True)


@row("S0-3")
@pytest.mark.parametrize("name", REASONING)
def test_empty_and_unfinished_reasoning(name: str) -> None:
    open, close = REASONING[name]
    check(name, f"{open}\n\n{close}\n\nHi", [Text("Hi")])
    check(name, f"{open}a b", [Reasoning("a b")])


@pytest.mark.parametrize("name", [name for name in REASONING if not REASONING_FORMATS[name].is_implied])
def test_answer_without_reasoning(name: str) -> None:
    check(name, "Just  this.\n", [Text("Just  this.\n")])


@row("S0-4")
@pytest.mark.parametrize("name", REASONING)
def test_partial_tags_are_released(name: str) -> None:
    open, close = REASONING[name]
    check(name, f"{open}a {close[:-1]} b{close}c {close[:3]}", [Reasoning(f"a {close[:-1]} b"), Text(f"c {close[:3]}")])


def test_implied_reasoning_need_no_opening_tag() -> None:
    for name in ("deepseek_r1", "minimax_m2", "step3", "step5"):
        assert run(["a</think>b"], reasoning=name, tools=None) == [Reasoning("a"), Text("b")]


def test_appended_reasoning_are_content() -> None:
    for text in ("a\n</think>\n\nb", "<think>a\n</think>\n\nb"):
        for pieces in cuts(text):
            assert run(pieces, reasoning="minimax_m2_append_think", tools=None) == [Text("<think>a\n</think>\n\nb")]


def test_wrapped_answers_lose_their_tags() -> None:
    check("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nHi\nyou\n</answer>", [Reasoning("a"), Text("Hi\nyou")])
    check(
        "ernie45",
        "a\n</think>\n\n<response>\nHi\n</response>\n",
        [Reasoning("a"), Text("Hi")],
        starts_in_reasoning=True,
    )
    check("hunyuan_a13b", "Use <answer> and </answer>.", [Text("Use <answer> and </answer>.")])
    check("hunyuan_a13b", "<answer>\nHi\n", [Text("Hi\n")])


def test_cohere_and_frames_mark_their_answers() -> None:
    text = "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>"
    check("cohere_command3", text, [Reasoning("a"), Text("Hi")])
    text = "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
    check("kimi_k3", text, [Reasoning("a"), Text("Hi")])
    text = "<|content_thinking|>a<|end_message|><|message_model|><|content_text|>Hi<|end_message|>"
    check("inkling", text, [Reasoning("a"), Text("Hi")])


HARMONY_CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>'
CALL = [ToolCallStart(0, "c0", "f"), ToolCallDelta(0, '{"a": "x"}'), ToolCallEnd(0)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
            [Reasoning("a"), Text("Hi")],
        ),
        (f"<|channel|>analysis<|message|>a<|end|>{HARMONY_CALL}", [Reasoning("a"), *CALL]),
        (
            "<|channel|>commentary<|message|>I look.<|end|>" + HARMONY_CALL,
            [Text("I look."), *CALL],
        ),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": "x"}<|call|>', CALL),
        ("<|channel|>final<|message|>to=functions.f is text", [Text("to=functions.f is text")]),
        ("<|channel|>unheard of<|message|>x", [Text("x")]),
        ("Plain, without headers", [Text("Plain, without headers")]),
        (HARMONY_CALL.replace(".f", ".rm"), [Text('{"name": "rm", "arguments": {"a": "x"}}')]),
        (HARMONY_CALL.replace("functions.", ""), CALL),
        (HARMONY_CALL.replace(".f", ".a.b"), [Text('{"name": "a.b", "arguments": {"a": "x"}}')]),
        (HARMONY_CALL.replace("commentary to=functions.f", "analysis to=f"), CALL),
        ('<|start|>assistant to=f<|channel|>commentary json<|message|>{"a": "x"}<|call|>', CALL),
        ('to=f<|channel|>commentary <|constrain|>json<|message|>{"a": "x"}<|call|>', CALL),
        ("<|channel|>commentary to=assistant<|message|>Hi<|end|>", [Text("Hi")]),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>Hi",
            [Reasoning("a"), Text("Hi")],
        ),
        (f"<|channel|>commentary to=assistant<|message|>Hi<|end|>{HARMONY_CALL}", CALL),
        ("<|channel|>analysis to=assistant<|message|>Hi<|end|>", [Reasoning("Hi")]),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>",
            [Reasoning("a\nb")],
        ),
        *((HARMONY_CALL.replace("json", word), CALL) for word in ("JSON", "Json", "application/json", "python3")),
        ("<|channel|>final <|constrain|>JSON<|message|>{}<|return|>", [Text("{}")]),
        ("<|channel|>final<|constrain|>Markdown<|message|>Hi<|return|>", [Text("Hi")]),
        (HARMONY_CALL.replace("<|channel|>", "<|channel|>––"), CALL),
        (HARMONY_CALL.replace("<|channel|>", "<|channel|>-- "), CALL),
        ("<|channel|>— analysis<|message|>a<|end|><|channel|>—final<|message|>Hi", [Reasoning("a"), Text("Hi")]),
        ("<|channel|>–– commentary without<|end|>", [Text("without")]),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|call|>", [CALL[0], ToolCallDelta(0, "{}"), CALL[2]]),
        ("<|start|>assistant to=functions.f<|channel|>commentary<|end|>Hi", [Text("Hi")]),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", [Reasoning("print(1)")]),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
            [Text("I look.\nHi")],
        ),
        (
            "<|channel|>commentary<|message|>I look.\n<|end|><|channel|>analysis<|message|>a<|end|>"
            "<|channel|>final<|message|>Hi",
            [Text("I look.\n"), Reasoning("a"), Text("Hi")],
        ),
        ("<|start|>assistant<|message|>Hi<|return|>", [Text("Hi")]),
        ("<|channel|><|channel|>final<|message|><|message|>Hi<|end|><|end|>", [Text("Hi")]),
        ("<|channel|>final<|message|>Hi<|end|><|start|>assistant<|channel|>analysis", [Text("Hi")]),
        ("Write `<|channel|>` and `<|message|>`.", [Text("Write `<|channel|>` and `<|message|>`.")]),
        (HARMONY_CALL[: HARMONY_CALL.index('"}')], [CALL[0], ToolCallDelta(0, '{"a": "x')]),
        (
            "<|channel|>analysis<|message|>a<|channel|>final<|message|>Hi",
            [Reasoning("a"), Text("Hi")],
        ),
    ],
)
def test_harmony(text: str, expected: list[Any]) -> None:
    check("openai_gptoss", text, expected, tools="openai")


DOTTED = [tool("fs.read", a={"type": "string"})]


@pytest.mark.parametrize("recipient", ["functions.fs.read", "fs.read"])
def test_a_harmony_recipient_may_have_dots(recipient: str) -> None:
    text = HARMONY_CALL.replace("functions.f", recipient)
    (start, *_) = run([text], reasoning="openai_gptoss", tools="openai", tool_specs=DOTTED)
    assert start == ToolCallStart(0, "c0", "fs.read")


@pytest.mark.parametrize("name", ["thought", "analysis", "thinking", ""])
def test_channels_named_like_reasoning_are_reasoning(name: str) -> None:
    """A name ends its line; a channel of the usual name needs no line."""
    check("gemma4", f"<|channel>{name}\nhm\n<channel|>Hi", [Reasoning("hm"), Text("Hi")])
    check("gemma4", f"Hi<channel|><|channel>{name}\n<|channel>thought\nhm", [Text("Hi"), Reasoning("hm")])


@pytest.mark.parametrize("name", ["content", "final", "answer", "response"])
def test_channels_named_like_an_answer_are_content(name: str) -> None:
    check("gemma4", f"<|channel>{name}\nHi", [Text("Hi")])
    check("gemma4", f"<|channel>thought\nhm<channel|><|channel>{name}\nHi<channel|>", [Reasoning("hm"), Text("Hi")])


@pytest.mark.parametrize("text", ["my thought", "Hmm", "thou", "a" * 60, "This\nThat", "ok\n\nso", "final answer\nx"])
def test_a_channel_without_a_name_keeps_its_text(text: str) -> None:
    check("gemma4", f"<|channel>{text}<channel|>Hi", [Reasoning(text), Text("Hi")])
    check("gemma4", f"<|channel>{text} indeed", [Reasoning(f"{text} indeed")])


def test_a_channel_of_the_usual_name_may_be_empty() -> None:
    check("gemma4", "<|channel>thought<channel|>Hi", [Text("Hi")])
    check("gemma4", "<|channel>thought", [])


KIMI_CALL = '<|open|>call tool="f" index="1"<|sep|>{}<|close|>call<|sep|>'
JSON_BLOCK = '<|open|>json type="object"<|sep|>{"a": "x"}<|close|>json<|sep|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<|open|>tools<|sep|>{KIMI_CALL.replace('{}', JSON_BLOCK)}<|close|>tools<|sep|>", CALL),
        (f"{KIMI_CALL.replace('{}', JSON_BLOCK)}<|close|>message<|sep|><|end_of_msg|>", CALL),
        (
            "<|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
            [Text("Hi")],
        ),
        (
            f"<|open|>tools<|sep|>{KIMI_CALL.replace('{}', JSON_BLOCK)}".replace('tool="f"', 'tool="rm"'),
            [Text('{"name": "rm", "arguments": {"a": "x"}}')],
        ),
        (
            f"<|open|>tools<|sep|>{KIMI_CALL.replace('{}', '')}<|close|>tools<|sep|>",
            [CALL[0], ToolCallDelta(0, "{}"), CALL[2]],
        ),
    ],
)
def test_kimi_k3_writes_all_arguments_as_one_object_too(text: str, expected: list[Any]) -> None:
    check("kimi_k3", text, expected, tools="kimi_k3")


OPEN_BLOCK, CLOSE_BLOCK = '<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        ('\n{ "a": "é\\n", "b": [1, {"c": 2.5}] } ', '{ "a": "é\\n", "b": [1, {"c": 2.5}] }'),
        ("{}", "{}"),
        ('{"a": "x"}' + CLOSE_BLOCK + OPEN_BLOCK + "z", '{"a": "x", "arguments": "z"}'),
        ("{}" + CLOSE_BLOCK + OPEN_BLOCK + "z", '{"arguments": "z"}'),
        ("z", '{"arguments": "z"}'),
        ("", '{"arguments": ""}'),
    ],
)
def test_a_json_block_of_kimi_k3_at_every_cut(block: str, arguments: str) -> None:
    text = KIMI_CALL.replace("{}", OPEN_BLOCK + block + CLOSE_BLOCK)
    check("kimi_k3", text, [CALL[0], ToolCallDelta(0, arguments), CALL[2]], tools="kimi_k3")
    shown = Text(f'{{"name": "rm", "arguments": {arguments}}}')
    check("kimi_k3", text.replace('"f"', '"rm"'), [shown], tools="kimi_k3")


@pytest.mark.parametrize(
    ("block", "cut", "ended"),
    [
        ('{"a": "x', '{"a": "x', '{"a": "x"}'),
        ('{"a": "x", "b', '{"a": "x", "b', '{"a": "x"}'),
        ('{"a": "x", "b": [1', '{"a": "x", "b": [1', '{"a": "x", "b": [1]}'),
        ('{"a": "x"}', '{"a": "x"}', '{"a": "x"}'),
        (" ", None, "{}"),
    ],
)
def test_a_json_block_of_kimi_k3_that_ends_early(block: str, cut: str | None, ended: str) -> None:
    text = KIMI_CALL.partition("{}")[0] + OPEN_BLOCK + block
    check("kimi_k3", text, [CALL[0], *([] if cut is None else [ToolCallDelta(0, cut)])], tools="kimi_k3")
    is_broken = block != ended
    events = [CALL[0], ToolCallDelta(0, ended), ToolCallEnd(0, is_broken=is_broken)]
    made = run([text], reasoning="kimi_k3", tools="kimi_k3", tool_specs=TOOLS, is_end=True)
    assert made[:3] == events
    assert len(made) == (4 if is_broken else 3)


def test_a_json_block_of_kimi_k3_that_is_no_json_loses_nothing() -> None:
    text = KIMI_CALL.replace('"f"', '"rm"').replace("{}", OPEN_BLOCK + '{"a": "x"} so' + CLOSE_BLOCK)
    check("kimi_k3", text, [Text('{"name": "rm", "arguments": {"a": "x"}so')], tools="kimi_k3")


def test_harmony_reads_messages_without_a_reasoning_format() -> None:
    assert run(["<|channel|>analysis<|message|>a<|end|>"], reasoning=None, tools="openai") == [Reasoning("a")]


def test_muse_calls_follow_their_recipient() -> None:
    text = (
        "to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Hi<|eom|><|start|>assistant to=f<|message|>"
        '<atem:function_calls><atem:invoke name="f"><atem:parameter name="a">x</atem:parameter></atem:invoke>'
        "</atem:function_calls><|eom|>"
    )
    check("muse", text, [Reasoning("hm"), Text("Hi"), *CALL], tools="muse")


@row("S0-10")
@pytest.mark.parametrize(
    ("reasoning", "tools"), [("qwen3", "glm45"), ("qwen3", "kimi_k2"), ("deepseek_v4", "deepseek_v4")]
)
def test_a_call_ends_unfinished_reasoning(reasoning: str, tools: str) -> None:
    call = {
        "glm45": "<tool_call>g</tool_call>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    }[tools]
    events = run(list(f"<think>hm {call}"), reasoning=reasoning, tools=tools, tool_specs=TOOLS)
    assert events[0] == Reasoning("hm ")
    assert [type(event) for event in events[1:]] == [ToolCallStart, ToolCallDelta, ToolCallEnd]


# Ids of calls


def ids(text: str, tools: str) -> list[str]:
    events = [*(parser := OutputParser(None, tools)).feed(text), *parser.finish()]
    return [event.call_id for event in events if isinstance(event, ToolCallStart)]


def test_ids_that_the_model_wrote_are_kept_once() -> None:
    call = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    first, second = ids(call * 2, "kimi_k2")
    assert first == "functions.f:3"
    assert second.startswith("call_")
    assert ids('[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}', "mistral") == ["abcDEF123"]


def test_mistral_ids_have_nine_characters() -> None:
    found = ids('[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f{"a": 1}[TOOL_CALLS][{"name": "f", "arguments": {}}]', "mistral")
    assert len(set(found)) == 3
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in found)


# Calls in another family's way


FOREIGN = {
    "json in tags": '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>',
    "xml in tags": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
    "xml alone": "<function=f><parameter=a>x</parameter></function>",
    "keys and values": "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>",
    "json alone": '{"name": "f", "parameters": {"a": "x"}}',
    "list": '<tool_calls>[{"name": "f", "arguments": {"a": "x"}}]</tool_calls>',
    "function_call": '<function_call>{"name": "f", "arguments": {"a": "x"}}</function_call>',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x"}}]',
    "mistral by name": '[TOOL_CALLS]f[ARGS]{"a": "x"}',
    "invoke": '<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></invoke></minimax:tool_call>',
    "python": "[f(a='x')]",
}


@row("S4-2")
@pytest.mark.parametrize("style", FOREIGN)
@pytest.mark.parametrize("tools", ["gemma4", "kimi_k2", "generic"])
def test_calls_in_another_way_are_found_where_tools_are_declared(style: str, tools: str) -> None:
    text = FOREIGN[style]
    for pieces in cuts(text):
        events = run(pieces, reasoning=None, tools=tools, tool_specs=TOOLS)
        assert [type(event) for event in events] == [ToolCallStart, ToolCallDelta, ToolCallEnd], pieces
        assert json.loads(events[1].arguments) == {"a": "x"}
    assert run([text.replace("f", "rm", 1)], reasoning=None, tools=tools, tool_specs=[tool("other")]) == [
        Text(text.replace("f", "rm", 1))
    ]
    assert not any(isinstance(event, ToolCallStart) for event in run([text], reasoning=None, tools="gemma4"))


@row("S4-2")
def test_after_a_call_in_its_own_way_no_other_is_looked_for() -> None:
    own = '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'
    foreign = FOREIGN["json in tags"]
    names = itertools.chain.from_iterable([event] for event in run([own, foreign], tools="gemma4", tool_specs=TOOLS))
    events = list(names)
    assert events[:3] == CALL
    assert events[3:] == [Text(foreign)]


def test_foreign_calls_inside_reasoning_are_reasoning() -> None:
    text = f"<think>{FOREIGN['json in tags']}</think>"
    assert run([text], tools="kimi_k2", tool_specs=TOOLS) == [Reasoning(FOREIGN["json in tags"])]


# The ends of messages


@pytest.mark.parametrize(
    ("tools", "end"), [("gigachat3", "<|message_sep|>"), ("llama3_json", "<|eom_id|>"), ("inkling", "<|end_message|>")]
)
def test_the_token_that_ends_a_message_is_no_text(tools: str, end: str) -> None:
    for options in ({}, {"marker_tokens": frozenset({end, "<|role_sep|>"})}):
        pieces = [*"Hi", (end, True)]
        assert run(pieces, reasoning=None, tools=tools, tool_specs=TOOLS, **options) == [Text("Hi")]


def test_a_tag_that_carries_no_word_is_none() -> None:
    """What follows it is text as soon as it is no word, and the cut end of a reply hides one word at most."""
    check("hy_v4", "Hi\n<think:Q or b", [Text("Hi\nQ or b")])
    check("hy_v4", "Hi\n</think:Q<x", [Text("Hi\nQ<x")])
    check("hy_v4", f"Hi\n<think:{'Q' * 65}>", [Text(f"Hi\n{'Q' * 65}>")])
    check("hy_v4", "Hi\n</think:Q", [Text("Hi\n")])
    parser = OutputParser("hy_v4", None)
    assert parser.feed("Hi\n<think:a b") == [Text("Hi\n"), Text("a b")]
