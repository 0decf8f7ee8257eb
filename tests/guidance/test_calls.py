"""Whatever a grammar of calls lets a model write, its parser reads as calls to declared tools with valid arguments."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.named_formats import OutputParser, calls_in_text, required_calls
from tests.support.rows import row
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.events import ReasoningDelta, ToolCallStart
from vllm_mlx.core.messages import ToolSpec
from vllm_mlx.formats import SchemaBudget, detect_formats, read_schemas, selection
from vllm_mlx.formats.family import NO_HEADER, Family
from vllm_mlx.formats.layouts import json_list, tags
from vllm_mlx.guidance.grammars import GuidedTool

from ..formats.families import FAMILIES as SPELLED
from ..formats.support import TOOL_FORMATS
from .random_sampler import RandomSampler, sampler
from .schemas import validate

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "units": {"enum": ["c", "f"]},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "flag": {"type": "boolean"},
        "note": {"type": ["string", "null"], "maxLength": 8},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "label": {"type": "string", "maxLength": 6}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "day": {"type": "string", "format": "date"},
        "word": {"type": "string", "pattern": "^[a-z]{1,9}$"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}]},
        "shared": {"$ref": "#/$defs/Word"},
    },
    "required": ["days", "city"],
    "additionalProperties": False,
    "$defs": {"Word": {"type": "string", "maxLength": 4}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (ToolSpec("get_weather", None, WEATHER), ToolSpec("noop", None, NOTHING))
GUIDED = [GuidedTool.of(tool, "tools", is_strict=True) for tool in TOOLS]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


def sampler_of(name: str, *, has_tokens: bool) -> RandomSampler:
    """One whose tokenizer has the tags of a format as tokens, or none of them."""
    if not has_tokens:
        return sampler()
    tags = [tag for tag in TOOL_FORMATS[name].tags if tag[0] in "<[" and tag[-1] in ">]" and len(tag) > 2]
    return sampler(tuple(dict.fromkeys(tags)))


def check_calls(calls: list[tuple[str, Any]]) -> None:
    for tool, arguments in calls:
        validate(arguments, SCHEMAS[tool])


def text_or_tokens(names: Iterable[str]) -> list[Any]:
    """Each name with its tags as text, and as tokens. Every run has one of the two, in turns."""
    return [
        pytest.param(
            name,
            has_tokens,
            id=f"{name}-{'tokens' if has_tokens else 'text'}",
            marks=() if has_tokens == bool(number % 2) else pytest.mark.full,
        )
        for number, name in enumerate(names)
        for has_tokens in (False, True)
    ]


@row("S0-9")
@pytest.mark.parametrize(("name", "has_tokens"), text_or_tokens(sorted(TOOL_FORMATS)))
def test_forced_calls_are_read_as_they_were_meant(name: str, has_tokens: bool) -> None:
    one = sampler_of(name, has_tokens=has_tokens)
    grammar = required_calls(GUIDED, name, one.writer(), NO_HEADER, None)
    for seed in range(2):
        ids = one.draw_reply(grammar, seed, most=2500, ends=0.5)
        assert ids is not None, "it ends"
        read = one.read(ids, name, TOOLS)
        assert read.calls and read.num_open == 0 and not read.text.strip(), one.text(ids)
        check_calls(read.calls)


AS_JSON = {family.name for family in SPELLED if '{"a": 1' in family.call("f", {"a": 1}, 0)}  # in the schema's order
APART = [family.name for family in SPELLED if family.name not in AS_JSON]


@row("S0-9")
@pytest.mark.parametrize("name", sorted({id(TOOL_FORMATS[name]): name for name in APART}.values()))
def test_required_arguments_come_first_where_each_is_written_apart(name: str) -> None:
    """Then the optional ones, both in the order of the schema."""
    flag = {"type": "boolean"}
    properties = {"one": flag, "two": flag, "three": flag, "four": flag, "five": flag}
    schema = {"properties": properties, "required": ["four", "two"], "additionalProperties": False}
    spec = ToolSpec("f", None, schema)
    one = sampler_of(name, has_tokens=False)
    grammar = required_calls([GuidedTool.of(spec, "tools", is_strict=True)], name, one.writer(), NO_HEADER, 1)
    num_longer = 0
    for seed in range(12):
        ids = one.draw_reply(grammar, seed)
        assert ids is not None
        [(_, arguments)] = one.read(ids, name, [spec]).calls
        assert list(arguments) == [key for key in ("two", "four", "one", "three", "five") if key in arguments]
        num_longer += len(arguments) > 2
    assert num_longer, "some have optional arguments"


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"generic"}))
def test_one_call_where_one_is_allowed(name: str) -> None:
    one = sampler()
    grammar = required_calls(GUIDED[1:], name, one.writer(), NO_HEADER, 1)
    ids = one.draw_reply(grammar, most=300)
    assert ids is not None
    assert one.read(ids, name, TOOLS).calls == [("noop", {})]


@row("S0-9")
@pytest.mark.parametrize("name", ["qwen3_xml", "glm45", "deepseek_v32", "minimax_m3", "gemma4", "lfm2"])
@pytest.mark.parametrize("schema", [{"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "integer"}]}])
def test_a_text_of_any_length_holds_no_special_token(name: str, schema: dict[str, Any]) -> None:
    """Above all not the one that ends the reply."""
    spec = ToolSpec("f", None, {"properties": {"a": schema}, "required": ["a"], "additionalProperties": False})
    one = sampler_of(name, has_tokens=True)
    grammar = required_calls([GuidedTool.of(spec, "tools", is_strict=True)], name, one.writer(), NO_HEADER, 1)
    for seed in range(3):
        ids = one.draw_reply(grammar, seed, most=60, ends=1.0)
        assert ids is None or one.read(ids, name, [spec]).num_open == 0


@pytest.mark.parametrize("types", ["string", ["string", "null"], []])
def test_arguments_that_are_no_object_are_refused(types: Any) -> None:
    with pytest.raises(InvalidParameter, match="schema of an object") as caught:
        GuidedTool.of(ToolSpec("f", None, {"type": types}), "tools[0].input_schema", is_strict=True)
    assert caught.value.param == "tools[0].input_schema"


def test_arguments_that_may_also_be_null_are_an_object() -> None:
    one = sampler()
    schema = {"type": ["null", "object"], "properties": {"a": {"const": 1}}, "required": ["a"]}
    spec = ToolSpec("f", None, {**schema, "additionalProperties": False})
    grammar = required_calls([GuidedTool.of(spec, "tools", is_strict=True)], "hermes", one.writer(), NO_HEADER, 1)
    for seed in range(6):
        ids = one.draw_reply(grammar, seed)
        assert ids is not None and one.read(ids, "hermes", [spec]).calls == [("f", {"a": 1})]


@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_xml", "glm45", "deepseek_v32", "kimi_k2", "lfm2", "gemma4", "mistral"]
)
def test_text_is_free_until_a_call_begins(name: str) -> None:
    one = sampler_of(name, has_tokens=True)
    grammar = calls_in_text(GUIDED, name, one.writer(), NO_HEADER, None)
    num_calls = 0
    for seed in range(6):
        ids = one.draw_reply(grammar, seed, most=2500, ends=0.02)
        assert ids is not None
        read = one.read(ids, name, TOOLS)
        assert read.num_open == 0
        check_calls(read.calls)
        num_calls += len(read.calls)
    assert num_calls > 0
    matcher = one.compiler.compile(grammar, "tools").deep_copy()
    said = one.tokenizer.encode("Let me look <b>that</b> up: {1}, [2].", add_special_tokens=False)
    assert matcher.try_consume_tokens(said) == len(said)
    assert matcher.is_accepting()


def test_text_beside_one_call_holds_no_other() -> None:
    one = sampler_of("hermes", has_tokens=True)
    grammar = calls_in_text(GUIDED, "hermes", one.writer(), NO_HEADER, 1)
    call = one.tokenizer.encode(
        '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>', add_special_tokens=False
    )
    matcher = one.compiler.compile(grammar, "tools").deep_copy()
    assert matcher.try_consume_tokens(call) == len(call) and matcher.try_consume_tokens(call) == 0


def test_a_tool_that_is_not_strict_takes_any_arguments() -> None:
    one = sampler_of("hermes", has_tokens=True)
    tools = [GUIDED[0], GuidedTool.of(ToolSpec("free", None, WEATHER), "tools", is_strict=False)]
    matcher = one.compiler.compile(calls_in_text(tools, "hermes", one.writer(), NO_HEADER, None), "tools")

    def takes(text: str) -> bool:
        ids = one.tokenizer.encode(text, add_special_tokens=False)
        return matcher.deep_copy().try_consume_tokens(ids) == len(ids)

    assert takes('<tool_call>\n{"name": "free", "arguments": {"anything": [1]}}\n</tool_call>')
    assert not takes('<tool_call>\n{"name": "get_weather", "arguments": {"anything": [1]}}\n</tool_call>')
    assert not takes('<tool_call>\n{"name": "other"')


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"not": {}}}}, "tools.properties.a.not"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "tools.properties.a.items.uniqueItems"),
        ({"minProperties": 2}, "tools.minProperties"),
        ({"patternProperties": {"a": {}}}, "tools.patternProperties"),
    ],
)
def test_what_a_call_cannot_be_held_to_is_refused_by_its_place(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        tool = GuidedTool.of(ToolSpec("f", None, schema), "tools", is_strict=True)
        required_calls([tool], "qwen3_xml", sampler().writer(), NO_HEADER, None)
    assert caught.value.param == path


def test_alternatives_of_a_whole_call() -> None:
    schema = {
        "properties": {"kind": {"enum": ["a", "b"]}},
        "anyOf": [
            {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
            {"properties": {"y": {"type": "boolean"}}, "required": ["y", "kind"]},
        ],
        "additionalProperties": False,
    }
    spec = ToolSpec("f", None, schema)
    one = sampler()
    grammar = required_calls([GuidedTool.of(spec, "tools", is_strict=True)], "qwen3_xml", one.writer(), NO_HEADER, 1)
    seen = set()
    for seed in range(12):
        ids = one.draw_reply(grammar, seed)
        assert ids is not None
        [(_, arguments)] = one.read(ids, "qwen3_xml", [spec]).calls
        validate(arguments, {key: value for key, value in schema.items() if key != "additionalProperties"})
        seen.add("x" in arguments)
    assert seen == {True, False}


@pytest.mark.parametrize("pattern", ["^a|b$", "^[0-9|]{2}$", "x", "^(a|b)c$", r"^\d+\|$", "a$|^b", "^[a^]b$|^x"])
def test_patterns_are_met_where_they_say(pattern: str) -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}}, "required": ["p"]}
    spec = ToolSpec("f", None, schema)
    one = sampler()
    grammar = required_calls([GuidedTool.of(spec, "tools", is_strict=True)], "qwen3_xml", one.writer(), NO_HEADER, 1)
    matcher = one.compiler.compile(grammar, "tools")
    for value in ("a", "b", "ab", "ba", "ac", "xay", "12", "1|", "bc", "7|", ""):
        written = f"<tool_call>\n<function=f>\n<parameter=p>\n{value}\n</parameter>\n</function>\n</tool_call>"
        ids = one.tokenizer.encode(written, add_special_tokens=False)
        is_written = matcher.deep_copy().try_consume_tokens(ids) == len(ids)
        assert is_written == (re.search(pattern, value) is not None), value


def test_one_row_adds_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Family(
        "acme",
        tags("<acme:muse>", "</acme:muse>"),
        json_list("<acme:calls>", "</acme:calls>"),
    )
    monkeypatch.setattr(selection, "FAMILIES", (row, *selection.FAMILIES))
    assert detect_formats("{{ x }}<acme:muse>{{ y }}<acme:calls>[", ()) == ("acme", "acme")
    schemas = read_schemas(((tool.name, tool.parameters, tool.name) for tool in TOOLS), SchemaBudget())
    parser = OutputParser(row.reasoning, row.calls, schemas=schemas)
    written = '<acme:muse>hm</acme:muse><acme:calls>[{"name": "noop", "arguments": {}}]</acme:calls>'
    events = [*parser.feed(written), *parser.finish()]
    assert events[0] == ReasoningDelta("hm")
    assert isinstance(events[1], ToolCallStart) and events[1].name == "noop"
    for one in (sampler(), sampler(("<acme:calls>", "</acme:calls>"))):
        for seed in range(3):
            ids = one.draw_reply(
                required_calls(GUIDED, row.calls, one.writer(), NO_HEADER, None), seed, most=2500, ends=0.5
            )
            assert ids is not None
            read = one.read(ids, row.calls, TOOLS)
            assert read.calls and not read.text.strip()
            check_calls(read.calls)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "deepseek_v41"])
def test_text_beside_strict_tools_may_hold_the_beginning_of_a_tag(name: str) -> None:
    """A tag of which only a part is a token begins a call with that token, not with the character before it."""
    one = sampler(("｜DSML｜",))
    matcher = one.compiler.compile(calls_in_text(GUIDED, name, one.writer(), NO_HEADER, None), "tools").deep_copy()
    ids = one.tokenizer.encode("if a < b and <i>x</i><y:\n<", add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    section = next(tag for tag in TOOL_FORMATS[name].tags if tag.startswith("<｜DSML｜"))
    assert matcher.try_consume_tokens(one.tokenizer.encode(section.removeprefix("<"), add_special_tokens=False))
    assert not matcher.is_accepting()
