"""In a tool's arguments an absent `additionalProperties` means false, and a declared name comes once."""

import json
from typing import Any

import pytest

from tests.support.named_formats import required_calls
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.messages import ToolSpec
from vllm_mlx.formats import SchemaBudget
from vllm_mlx.formats.family import NO_HEADER
from vllm_mlx.guidance.grammars import GuidedTool
from vllm_mlx.guidance.grammars.json_schema import closed

from .random_sampler import sampler

TEXT: Any = {"type": "string"}
BASE: Any = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
MORE: Any = {"properties": {"b": TEXT}}
KINDS: Any = [
    {"properties": {"kind": {"const": "x"}, "x": TEXT}, "required": ["kind"]},
    {"properties": {"kind": {"const": "y"}, "y": TEXT}, "required": ["kind"]},
]
DEEP: Any = {"type": "object", "properties": {"o": BASE}}
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {  # the schema, arguments that are written, and those that are not
    "top": ({**BASE, "required": []}, [{}, {"a": ""}], [{"b": ""}, {"type": "string"}]),
    "without type": (MORE, [{"b": "1"}], [{"a": "1"}]),
    "nothing declared": ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    "omitted": (None, [{}], [{"a": 1}]),
    "free": ({"type": "object"}, [{}, {"a": 1, "b": [2]}], [[]]),
    "free inside": ({"properties": {"m": {"type": "object"}}}, [{"m": {"k": 1}}], [{"n": {}}]),
    "explicit": ({**BASE, "additionalProperties": {"type": "integer"}}, [{"a": "", "k": 1}], [{"a": "", "k": ""}]),
    "explicit true": ({**BASE, "additionalProperties": True}, [{"a": "", "k": 1}], [{"k": 1}]),
    "nested": (DEEP, [{"o": {"a": ""}}], [{"o": {"a": "", "c": 1}}]),
    "in a list": ({"properties": {"l": {"items": BASE, "type": "array"}}}, [{"l": [{"a": ""}]}], [{"l": [{"c": 1}]}]),
    "referred": (
        {"properties": {"o": {"anyOf": [{"$ref": "#/$defs/B"}, {"type": "null"}]}}, "$defs": {"B": BASE}},
        [{"o": None}, {"o": {"a": ""}}],
        [{"o": {"a": "", "c": 1}}],
    ),
    "recursive": (
        {"properties": {"a": TEXT, "o": {"$ref": "#"}}},
        [{"o": {"o": {"a": ""}}}],
        [{"o": {"o": {"c": ""}}}],
    ),
    "map of objects": ({"properties": {"m": {"additionalProperties": BASE, "type": "object"}}},
                       [{"m": {"k": {"a": ""}}}], [{"m": {"k": {"a": "", "c": 1}}}]),
    "patterns": ({"properties": {"a": TEXT}, "patternProperties": {"^x-": {}}}, [{"x-1": 1}], [{"y": 1}]),
    "all of": ({"type": "object", "allOf": [BASE, MORE]}, [{"a": "", "b": ""}, {"a": "", "c": ""}], [{"b": ""}]),
    "all of, one empty": (
        {"allOf": [{"type": "object", "properties": {}}, BASE], "type": "object"}, [{"a": ""}], [{"a": 1}],
    ),
    "joined inside": (
        {"properties": {"o": BASE}, "allOf": [{"properties": {"o": MORE}}]}, [{"o": {"a": "", "b": ""}}], [{"o": {}}],
    ),
    "all of one": ({"properties": {"o": {"allOf": [{"$ref": "#/$defs/B"}]}}, "$defs": {"B": BASE}},
                   [{"o": {"a": ""}}], [{"o": {"a": "", "c": 1}}]),
    "inherited": (
        {"properties": {"o": {"allOf": [{"$ref": "#/$defs/B"}, MORE]}, "p": {"$ref": "#/$defs/B"}},
         "$defs": {"B": BASE}},
        [{"o": {"a": "", "b": ""}, "p": {"a": ""}}],
        [{"o": {"b": ""}}],
    ),
    "named as a property": (  # as some generators write it
        {"$ref": "#/definitions/A",
         "definitions": {"A": {"properties": {"o": {"$ref": "#/definitions/o"}}}, "o": BASE}},
        [{"o": {"a": ""}}],
        [{"o": {"a": "", "c": 1}}],
    ),
    "required by a part": (
        {**BASE, "allOf": [{"required": ["q"]}]},
        [{"a": "", "q": 1}],
        [{"a": ""}, {"a": "", "q": 1, "c": 1}],
    ),
    "one required": ({"properties": {"a": TEXT, "b": TEXT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
                     [{"a": ""}, {"b": ""}], [{}, {"a": "", "c": 1}]),
    "kinds": ({"type": "object", "oneOf": KINDS}, [{"kind": "x", "x": ""}],
              [{"kind": "x", "y": ""}, {"kind": "y", "c": 1}]),
    "kinds beside names": (
        {**BASE, "oneOf": KINDS},
        [{"a": "", "kind": "x", "x": ""}, {"a": "", "kind": "y"}],
        [{"a": ""}, {"a": "", "kind": "x", "x": 1}],
    ),
    "required and undeclared": ({**BASE, "required": ["a", "q"]}, [{"a": "", "q": 1}], [{"a": "", "q": 1, "c": 1}]),
    "joined with open": ({**BASE, "allOf": [{**MORE, "additionalProperties": True}]}, [{"a": "", "c": 1}], [{"c": 1}]),
    "explicit false": ({**BASE, "additionalProperties": False}, [{"a": ""}], [{"a": "", "c": 1}]),
    "a name twice": (BASE, [{"a": ""}], ['{"a": "", "a": ""}', '{"a": "", "\\u0061": ""}']),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_forced_json_arguments(case: str) -> None:
    schema, written, kept_out = CASES[case]
    one = sampler()
    tool = GuidedTool.of(ToolSpec("f", None, schema), "tools", is_strict=True)
    matcher = one.compiler.compile(required_calls([tool], "hermes", one.writer(), NO_HEADER, 1), "tools")

    def is_written(arguments: Any) -> bool:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        call = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
        ids = one.tokenizer.encode(call, add_special_tokens=False)
        return matcher.deep_copy().try_consume_tokens(ids) == len(ids)

    assert [arguments for arguments in written if not is_written(arguments)] == []
    assert [arguments for arguments in kept_out if is_written(arguments)] == []


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "glm45", "minimax_m3", "lfm2", "gemma4", "deepseek_v32"])
def test_no_format_writes_undeclared_names(name: str) -> None:
    """Nor one name twice, as its client reads the text of the arguments."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "o": DEEP}, "required": ["o"]}
    spec = ToolSpec("f", None, schema)
    one = sampler()
    grammar = required_calls([GuidedTool.of(spec, "tools", is_strict=True)], name, one.writer(), NO_HEADER, 1)
    for seed in range(4):
        ids = one.draw_reply(grammar, seed, most=2500)
        if ids is not None:
            [(_, arguments)] = one.read(ids, name, [spec]).calls
            assert {*arguments} <= {"a", "o"} and {*arguments["o"]} <= {"o"} and {*arguments["o"].get("o", ())} <= {"a"}


@pytest.mark.parametrize("name", ["qwen3_xml", "gemma4"])
def test_alternatives_keep_their_own_names_where_each_argument_is_apart(name: str) -> None:
    spec = ToolSpec("f", None, {**BASE, "properties": {"a": {"enum": ["z"]}}, "oneOf": KINDS})
    one = sampler()
    grammar = required_calls([GuidedTool.of(spec, "tools", is_strict=True)], name, one.writer(), NO_HEADER, 1)
    seen = set()
    for seed in range(20):
        if (ids := one.draw_reply(grammar, seed, most=900)) is not None:
            [(_, arguments)] = one.read(ids, name, [spec]).calls
            assert {*arguments} <= {"a", "kind", arguments["kind"]} and arguments["a"] == "z"
            seen.add(arguments["kind"])
    assert seen == {"x", "y"}


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_closing_visits_a_chain_of_references_once(keyword: str) -> None:
    """References that join one another double at each step."""
    chain = {f"D{n}": {keyword: [{"$ref": f"#/$defs/D{n + 1}"}] * 2, **MORE} for n in range(40)}
    schema = {"$ref": "#/$defs/D0", **BASE, "$defs": {**chain, "D40": BASE}}
    budget = SchemaBudget()
    assert closed(schema, "tools", budget) == schema
    assert budget.num_visits < 20_000


@pytest.mark.parametrize("target", [5, {"properties": 5}, {"required": 5}, {"required": [{}]}, {"$ref": 5}, None])
def test_a_reference_to_no_schema_is_refused_or_ignored(target: Any) -> None:
    schema = {**BASE, "allOf": [{"$ref": "#/x/T"}], "x": {"T": target}}
    one = sampler()
    with pytest.raises(InvalidParameter):
        tool = GuidedTool.of(ToolSpec("f", None, schema), "tools", is_strict=True)
        one.compiler.compile(required_calls([tool], "hermes", one.writer(), NO_HEADER, 1), "tools")
