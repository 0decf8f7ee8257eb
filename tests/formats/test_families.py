"""Every family's calls: whole, at every cut, every character alone, and with its tags as tokens."""

import json
from typing import Any

import pytest

from tests.support.named_formats import OutputParser
from vllm_mlx.core.events import ContentEvent, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

from .families import DSML, FAMILIES, NS, Arguments, Family
from .support import as_special, cuts, run, schemas_of, tool

TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("write", text={"type": "string"}, tags={"type": "array"}, meta={"type": "object"}),
    tool("now"),
]
ROME: Arguments = {"city": "Rome", "days": 2}
families = pytest.mark.parametrize("family", FAMILIES, ids=[f"{i}-{family.name}" for i, family in enumerate(FAMILIES)])


def expected(*calls: tuple[str, Arguments], before: str = "", behind: str = "") -> list[Any]:
    """Events, arguments as values."""
    events: list[Any] = [TextDelta(before)] if before else []
    for index, (name, arguments) in enumerate(calls):
        events += [(index, name), arguments, ToolCallEnd(index)]
    return [*events, *([TextDelta(behind)] if behind else [])]


def values(events: list[ContentEvent]) -> list[Any]:
    """Events, arguments as values, without the ids of calls."""
    plain: list[Any] = []
    for event in events:
        match event:
            case ToolCallStart(index, _, name):
                plain.append((index, name))
            case ToolCallDelta(_, arguments):
                plain.append(json.loads(arguments))
            case _:
                plain.append(event)
    return plain


def check(
    family: Family, text: str, events: list[Any] | None, *, tokens: bool = True, step: int = 1
) -> list[ContentEvent]:
    """The same at every cut, or every `step`-th, and with the tags as tokens. Returns the events."""

    def parsed(pieces: Any, **options: Any) -> list[ContentEvent]:
        return run(pieces, reasoning=None, tools=family.name, tool_specs=TOOLS, **options)

    whole = parsed([text])
    if events is not None:
        assert values(whole) == events
    for pieces in cuts(text, step):
        assert parsed(pieces) == whole, pieces
    if tokens and family.tokens:
        special = as_special(text, family.tokens)
        by_character = [part for piece, is_token in special for part in ([(piece, True)] if is_token else list(piece))]
        known = frozenset({*family.tokens, "\n", "json", "<|im_end|>"})
        for marked in (special, by_character):
            assert parsed(marked, marker_tokens=known) == whole
        assert parsed(special) == whole
    return whole


steps = pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.full)])  # one call is cut everywhere


@families
def test_one_call(family: Family) -> None:
    check(family, family.calls(("get_weather", ROME)), expected(("get_weather", ROME)))


@steps
@families
def test_several_calls(family: Family, step: int) -> None:
    calls = [("get_weather", ROME), ("now", {}), ("get_weather", {"city": "Oslo"})]
    check(family, family.calls(*calls), expected(*calls), step=step)


@families
def test_no_arguments(family: Family) -> None:
    check(family, family.calls(("now", {})), expected(("now", {})), step=3)


@steps
@families
def test_nested_arguments(family: Family, step: int) -> None:
    arguments = {"tags": [{"a": [1, 2]}, "b", -1.5], "meta": {"deep": {"er": "x"}, "on": [3]}}
    check(family, family.calls(("write", arguments)), expected(("write", arguments)), step=step)


@steps
@families
def test_unicode_and_quotes(family: Family, step: int) -> None:
    arguments = {"text": "東京 🙂 é \"q\" 'p' \\d\n\ttwo  lines"}
    check(family, family.calls(("write", arguments)), expected(("write", arguments)), step=step)


@families
def test_what_looks_like_tags_inside_a_string(family: Family) -> None:
    arguments = {"text": family.inside, "tags": ["<x>", "</y>"]}
    check(family, family.calls(("write", arguments)), expected(("write", arguments)), tokens=False, step=5)


@steps
@families
def test_text_before_and_behind(family: Family, step: int) -> None:
    text = f"Let me see.\n{family.calls(('get_weather', ROME))}\n\nDone."
    check(family, text, expected(("get_weather", ROME), before="Let me see.\n", behind="\n\nDone."), step=step)


@families
def test_layout_around_a_call_is_dropped(family: Family) -> None:
    check(family, f"\n\n{family.calls(('get_weather', ROME))}\n", expected(("get_weather", ROME)), step=5)


@families
def test_undeclared_tool_is_a_call_if_the_server_says_so(family: Family) -> None:
    parser = OutputParser(None, family.name, schemas=schemas_of(TOOLS), takes_undeclared=True)
    events = [*parser.feed(family.calls(("rm", {"path": "/"}), ("now", {}))), *parser.finish()]
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["rm", "now"]


def test_calls_in_other_formats_are_calls_of_declared_tools_only() -> None:
    parser = OutputParser(None, "kimi_k2", schemas=schemas_of(TOOLS), takes_undeclared=True)
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    events = [*parser.feed(text), *parser.finish()]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == text


@steps
@families
def test_undeclared_tool_among_declared_ones(family: Family, step: int) -> None:
    text = family.calls(("get_weather", ROME), ("rm", {"path": "/"}), ("now", {}))
    events = check(family, text, None, step=step)
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["get_weather", "now"]
    shown = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert "rm" in shown
    assert "/" in shown


@families
def test_reply_cut_inside_a_string(family: Family) -> None:
    text = family.calls(("get_weather", {"city": "Roma"}))
    events = check(family, text[: text.index("Roma") + 3], None)
    assert [type(event) for event in events] == [ToolCallStart, ToolCallDelta]
    assert events[0].name == "get_weather"
    assert events[1].arguments == '{"city": "Rom'


stops = pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.full)])  # of the places of an end


@stops
@families
def test_reply_cut_anywhere_is_a_call_or_text(family: Family, stride: int) -> None:
    text = family.calls(("get_weather", ROME))
    for end in range(0, len(text), stride):
        for pieces in ([text[:end]], list(text[:end])):
            events = run(pieces, reasoning=None, tools=family.name, tool_specs=TOOLS)
            names = [event.name for event in events if isinstance(event, ToolCallStart)]
            shown = "".join(event.text for event in events if isinstance(event, TextDelta))
            if names:
                assert names == ["get_weather"]
                assert not shown
            else:
                left = iter(text[:end])
                assert all(char in left for char in shown.strip()), "what is shown was written, in this order"


def is_part(value: Any, whole: Any) -> bool:
    """Of an argument whose end is missing; what is not yet of its type may be a string."""
    match value, whole:
        case dict(), dict():
            return [*value] == [*whole][: len(value)] and all(is_part(value[key], whole[key]) for key in value)
        case list(), list():
            return len(value) <= len(whole) and all(map(is_part, value, whole))
        case ((int() | float()), (int() | float())):
            return str(whole).startswith(str(value).removesuffix(".0"))
    return isinstance(value, str) and (not isinstance(whole, str) or whole.startswith(value))


RESTS = ("", " oops", "\n\nSorry, no.", "\ufffd", "\x00")


@stops
@families
def test_a_call_that_breaks_is_closed_and_its_text_is_content(family: Family, stride: int) -> None:
    """A call counts only if the model wrote its arguments whole; one that was announced is closed as JSON."""
    text = family.calls(("write", WRITTEN))
    for number, end in enumerate(range(0, len(text) + 1, stride)):
        for rest in RESTS if stride == 1 else RESTS[number % len(RESTS) :][:1]:
            check_broken(family, text[:end] + rest, is_cut=not rest)


WRITTEN = {"path": 'é "q"\n', "tags": [{"a": [1, 22]}, "b", -1.5], "text": "東京 🙂 it's"}


def check_broken(family: Family, text: str, *, is_cut: bool) -> None:
    events = run([text], reasoning=None, tools=family.name, tool_specs=TOOLS, is_end=True)
    if len(text) % 5 == 0:
        assert run(text, reasoning=None, tools=family.name, tool_specs=TOOLS, is_end=True) == events
    if isinstance(events[0] if events else None, ToolCallStart):
        written = json.loads("".join(event.arguments for event in events if isinstance(event, ToolCallDelta)))
        (end,) = (event for event in events if isinstance(event, ToolCallEnd))
        assert is_part(written, WRITTEN) or not is_cut
        assert end.is_broken or WRITTEN | written == WRITTEN, text


ELEMENTS = {
    "qwen3_xml": ("<tool_call><function=write>", "<parameter=tags>@</parameter>", "</function></tool_call>"),
    "glm45": ("<tool_call>write", "<arg_key>tags</arg_key><arg_value>@</arg_value>", "</tool_call>"),
    "minimax_m2": ('<invoke name="write">', '<parameter name="tags">@</parameter>', "</invoke>"),
    "minimax_m3": (f'{NS}<invoke name="write">', f"{NS}<tags>@{NS}</tags>", f"{NS}</invoke>"),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_an_argument_written_twice_is_a_list_where_it_is_declared_so(name: str) -> None:
    head, element, tail = ELEMENTS[name]
    others = element.replace("tags", "path"), element.replace("tags", "text")
    for values, expected in ((("a", "b"), ["a", "b"]), (('["a"]', '["b", 1]'), ["a", "b", 1]), (("a",), "a")):
        items = "".join(element.replace("@", value) for value in values)
        text = head + others[0] + items + others[1] + tail
        events = run([text], reasoning=None, tools=name, tool_specs=TOOLS)
        written = json.loads("".join(event.arguments for event in events if isinstance(event, ToolCallDelta)))
        assert written == {"path": "@", "tags": expected, "text": "@"}
        assert run(text, reasoning=None, tools=name, tool_specs=TOOLS) == events


SPELLINGS = [
    ("pythonic", "[write(text='sed -n '3,9p' a.py')]", [{"text": "sed -n '3,9p' a.py"}]),
    ("pythonic", '[write(text=\'it\'s\', path="a "b" c")]', [{"text": "it's", "path": 'a "b" c'}]),
    (
        "lfm2",
        "<|tool_call_start|>[write(tags={'a', 2, None,}), now()]<|tool_call_end|>",
        [{"tags": ["a", 2, None]}, {}],
    ),
    ("pythonic", "[write(tags=[{1}, {'a': {'b'}}, {}])]", [{"tags": [[1], {"a": ["b"]}, {}]}]),
    ("pythonic", "[ write ( text = 'a' ), now () ]", [{"text": "a"}, {}]),
    ("gemma4", '<|tool_call>call: write {text:<|"|>a "b" c<|"|>}<tool_call|>', [{"text": 'a "b" c'}]),
    ("hermes", '<tool_call>{"name": " now ", "arguments": {}}, {"name": "now"}</tool_call>', [{}, {}]),
    ("glm45", '<tool_call>{"name": "now", "arguments": {}},\n{"name": "now"}]</tool_call>', [{}, {}]),
    ("internlm", '<|action_start|><|plugin|>{"name": "now"}, {"name": "now"}<|action_end|>', [{}, {}]),
    ("mistral", '[TOOL_CALLS]{"name": "now"}, {"name": "now"}', [{}, {}]),
    ("minimax_m2", '<invoke name=" write "><parameter name=" text ">a</parameter></invoke>', [{"text": "a"}]),
]


@pytest.mark.parametrize(("name", "text", "expected"), SPELLINGS)
def test_spellings_of_calls_that_weak_models_write(name: str, text: str, expected: list[Any]) -> None:
    events = check(next(family for family in FAMILIES if family.name == name), text, None)
    assert [json.loads(event.arguments) for event in events if isinstance(event, ToolCallDelta)] == expected
    assert len([event for event in events if event in (ToolCallEnd(0), ToolCallEnd(1))]) == len(expected)
    assert not [event for event in events if isinstance(event, TextDelta) and event.text.strip()]


OBJECTS = {
    "hermes": "<function=write>@</function>",
    "qwen3_xml": "<tool_call>\n<function=write>\n@\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call><function=write>@</function></seed:tool_call>",
    "llama3_json": "<function=write>@</function>",
    "glm45": "<tool_call>write\n@\n</tool_call>",
    "hy_v3": "<tool_calls><tool_call>write<tool_sep>\n@</tool_call></tool_calls>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>write\n@\n</ifm|tool_call></ifm|tool_calls>",
    "minimax_m2": '<minimax:tool_call><invoke name="write">@</invoke></minimax:tool_call>',
    "minimax_m3": f'{NS}<tool_call>{NS}<invoke name="write">@{NS}</invoke>{NS}</tool_call>',
    "deepseek_v32": f'<{DSML}function_calls>\n<{DSML}invoke name="write">\n@\n</{DSML}invoke>\n</{DSML}function_calls>',
    "dots": '<dots_function_call><invoke name="write">@</invoke></dots_function_call>',
    "muse": '<atem:function_calls><atem:invoke name="write">@</atem:invoke></atem:function_calls>',
    "minicpm5": '<function name="write">@</function>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|>@<|close|>call<|sep|>',
}


@pytest.mark.parametrize("name", OBJECTS)
def test_one_object_of_all_arguments_stands_in_place_of_tags(name: str) -> None:
    options: dict[str, Any] = {"reasoning": None, "tools": name, "tool_specs": TOOLS, "is_end": True}
    for written in ('{"text": "a </x> {b}"}', '\n{"text": "a </x> {b}",} ', '{"text": "a </x> {b}"}}'):
        text = OBJECTS[name].replace("@", written)
        start, delta, end = run([text], **options)
        assert (start.name, json.loads(delta.arguments), end) == ("write", {"text": "a </x> {b}"}, ToolCallEnd(0)), text
        assert run(text, **options) == [start, delta, end]
    broken = run([OBJECTS[name].replace("@", '{"text": oops}')], **options)
    assert [event.is_broken for event in broken if isinstance(event, ToolCallEnd)] == [True]
    assert "oops" in "".join(event.text for event in broken if isinstance(event, TextDelta))


@families
def test_missing_closing_tags_between_calls(family: Family) -> None:
    """The call's own text is complete; what closes around it was left out before the next one opens."""
    first = family.calls(("get_weather", ROME))
    second = family.calls(("now", {}))
    short = first.removesuffix(family.close).rstrip() if family.close else first
    events = check(family, f"{short}\n{second}", None, step=5)
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["get_weather", "now"]


@families
def test_what_is_no_call_is_text_without_tags(family: Family) -> None:
    if family.open and family.garbage is not None:
        open = family.open.removesuffix("[").strip()
        close = family.close.removeprefix("]").strip()
        if not open.startswith(("<", "[")):
            open, close = "", ""
        text = f"Hm {open}no call{close} so"
        check(family, text, [TextDelta("Hm no call so")])
        quoted = f"Hm `{open}` no call `{close}` so"
        assert run([quoted], reasoning=None, tools=family.name, tool_specs=TOOLS) == [TextDelta(quoted)]
