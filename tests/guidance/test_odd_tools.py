"""A tool that is not strict makes no request fail: its name and what is known of its schema are held, the rest free."""

import json
from functools import cache
from typing import Any

import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.messages import ToolChoice, ToolSpec
from vllm_mlx.core.request import Guide, JsonSchema, Request
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.formats import SchemaBudget
from vllm_mlx.formats.families import CALL_FORMATS
from vllm_mlx.formats.pipeline import declared_schemas
from vllm_mlx.guidance.constraint_builder import ConstraintBuilder

from .random_sampler import sampler
from .scripted import INVENTED, Scripted, request

TEXT: Any = {"type": "string"}
DIGIT: Any = {"type": "integer", "minimum": 0, "maximum": 9}
FORMATS = ("hermes", "qwen3_xml", "minimax_m3", "gemma4", "lfm2", "deepseek_v32")


def nested(depth: int) -> Any:
    schema: Any = TEXT
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


# Schemas of an argument `x`, none of which can be enforced as it stands.
ARGUMENTS: dict[str, Any] = {
    "look-ahead": {"type": "string", "pattern": "^(?!\\.)[a-z.]+@[a-z]+$"},
    "back-reference": {"type": "string", "pattern": "(a)\\1"},
    "word boundary": {"type": "string", "pattern": "\\bword\\b"},
    "broken pattern": {"type": "string", "pattern": "["},
    "anchor inside": {"type": "string", "pattern": "a^b"},
    "counts in counts": {"type": "string", "pattern": "((a{100}){100}){100}"},
    "if": {"type": "object", "properties": {"a": TEXT}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "pattern of names": {"type": "object", "patternProperties": {"^(?=x)": TEXT}, "additionalProperties": False},
    "upper case": {"type": "STRING"},
    "a type list": {"type": ["string", "file"]},
    "enum without values": {"type": "string", "enum": []},
    "draft 4": {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
    "remote": {"$ref": "https://example.com/schema.json"},
    "nowhere": {"$ref": "#/$defs/gone"},
    "to itself": {"$ref": "#/properties/x"},
    "not": {"type": "string", "not": {"enum": ["a"]}},
    "unevaluated": {"type": "object", "properties": {"a": TEXT}, "unevaluatedProperties": False},
    "contradiction": {"type": "integer", "minimum": 5, "maximum": 3},
    "lengths": {"type": "string", "minLength": 9, "maxLength": 1},
    "format": {"type": "string", "format": 5},
    "a list": [TEXT],
    "null": None,
    "a text": "string",
    "properties in a list": {"type": "object", "properties": [TEXT], "additionalProperties": False},
    "required in a text": {"type": "object", "properties": {"a": TEXT}, "required": "a"},
    "deep": nested(70),
    "overlap": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "unique": {"type": "array", "items": TEXT, "uniqueItems": True},
    "no branch": {"anyOf": []},
    "other draft": {"type": "string", "$schema": "https://example.com/mine"},
    "no number": {"type": "integer", "multipleOf": 0},
    "endless": {"type": "string", "maxLength": 10**12},
}
# Complete schemas of a tool.
PARAMETERS: dict[str, Any] = {
    "no object": TEXT,
    "root if": {"type": "object", "properties": {"x": TEXT}, "if": {"required": ["x"]}, "then": {"required": ["y"]}},
    "root patterns": {"type": "object", "properties": {"x": TEXT}, "patternProperties": {"^a": TEXT}},
    "root minimum": {"type": "object", "properties": {"x": TEXT}, "minProperties": 1},
    "root reference": {"$ref": "#/definitions/A", "definitions": {"A": {"type": "object", "properties": {"x": TEXT}}}},
    "root enum": {"type": "object", "enum": [{"x": "a"}]},
    "alternatives": {"type": "object", "properties": {"x": TEXT}, "anyOf": [{"properties": {"x": TEXT}}] * 70},
    "an odd name": {"type": "object", "properties": {"a>b": TEXT, "x": TEXT}, "required": ["a>b"]},
    "no type": {"type": "object", "properties": {"x": {"minLength": 1}}},
    "nothing allowed": {"type": "object", "additionalProperties": False, "required": ["x"], "anyOf": [False]},
    "a list": {"properties": []},
    "long": {"type": "object", "properties": {f"p{n}": {"enum": [f"{m}" * 40 for m in range(20)]} for n in range(999)}},
}  # fmt: skip
GOOD = ToolSpec("good", None, {"type": "object", "properties": {"n": DIGIT}, "required": ["n"]})


def odd(argument: Any) -> Any:
    return {"type": "object", "properties": {"x": argument, "n": DIGIT}, "required": ["n"]}


@cache
def builder(name: str, grammar: Any = "names") -> ConstraintBuilder:
    tokenizer = sampler().tokenizer
    config = EngineConfig(model="m", tool_grammar=grammar)
    return ConstraintBuilder(tokenizer, config, vocab_size=tokenizer.vocab_size, tools=CALL_FORMATS[name])


def held(asked: Request, name: str, grammar: Any = "names") -> Any:
    budget = SchemaBudget()
    declared_schemas(asked, budget)
    constraint = builder(name, grammar).constraint(asked, PromptInputs(token_ids=(1,)), budget)
    assert constraint is not None
    return constraint.matcher


def accepts(matcher: Any, text: str) -> bool:
    """Whether a reply may begin so."""
    ids = sampler().tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.deep_copy().validate_tokens(ids) == len(ids))


SCHEMAS = {**{name: odd(each) for name, each in ARGUMENTS.items()}, **PARAMETERS}


@pytest.mark.parametrize("name", FORMATS)
def test_no_schema_of_a_tool_makes_a_forced_call_of_others_fail(name: str) -> None:
    for at, (what, schema) in enumerate(SCHEMAS.items()):
        if name != FORMATS[at % len(FORMATS)] and what != "long":
            continue
        choices = (ToolChoice("required"), ToolChoice("required", "bad"), ToolChoice("required", "good"))
        for choice in choices if what == "long" else choices[at // len(FORMATS) % 3 :][:1]:
            tools = (GOOD, ToolSpec("bad", None, schema, param="tools[1].function.parameters"))
            assert not held(request(tools, choice), name).is_error(), what


@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("what", SCHEMAS)
def test_every_odd_schema_in_every_format(what: str, name: str) -> None:
    tools = (GOOD, ToolSpec("bad", None, SCHEMAS[what]))
    assert not held(request(tools, ToolChoice("required")), name).is_error()


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("what", ARGUMENTS)
def test_what_is_known_of_an_odd_tool_is_held(what: str) -> None:
    """Its other arguments, and the other tools; of the odd argument, what its simple keywords say."""
    tools = (GOOD, ToolSpec("bad", None, odd(ARGUMENTS[what])))
    matcher = held(request(tools, ToolChoice("required")), "hermes")
    for name in ("good", "bad"):
        assert accepts(matcher, call(name, {"n": 1})) and not accepts(matcher, call(name, {"n": "1"}))
        assert not accepts(matcher, call(name, {"n": 1, "z": 1})), "closed"
    assert not accepts(matcher, call("ugly", {"n": 1}))
    if what in ("look-ahead", "not", "enum without values", "back-reference"):
        assert accepts(matcher, call("bad", {"x": "a@b", "n": 1}))
        assert not accepts(matcher, '<tool_call>\n{"name": "bad", "arguments": {"x": 1')
    if what == "if":
        assert accepts(matcher, call("bad", {"x": {"a": "", "b": 1}, "n": 1})), "the branch may declare it"
    if what == "pattern of names":
        assert accepts(matcher, call("bad", {"x": {"xy": ""}, "n": 1}))
    if what == "draft 4":
        assert not accepts(matcher, '<tool_call>\n{"name": "bad", "arguments": {"x": 2,')


@pytest.mark.parametrize("what", ["look-ahead", "if", "remote", "upper case"])
def test_strict_tools_and_formats_are_refused(what: str) -> None:
    strict = ToolSpec("bad", None, odd(ARGUMENTS[what]), strict=True, param="tools[1].function.parameters")
    with pytest.raises(InvalidParameter, match="tools"):
        held(request((GOOD, strict), ToolChoice("required")), "hermes")
    with pytest.raises(InvalidParameter, match="response_format"):
        guide = Guide(form=JsonSchema(odd(ARGUMENTS[what])), param="response_format")
        held(request((), ToolChoice("none"), sampling={"guide": guide}), "hermes")


def test_an_operator_s_grammar_of_all_tools_refuses_none() -> None:
    tools = (GOOD, ToolSpec("bad", None, odd(ARGUMENTS["if"])))
    assert accepts(held(request(tools, ToolChoice("auto")), "hermes", "strict"), "Hello.")


def test_many_odd_tools_among_many() -> None:
    """The good ones stay held, those that are refused only by the compiler are found, and found again at no cost."""
    schema = {**odd(ARGUMENTS["contradiction"]), "required": ["n", "x"]}
    odd_ones = [ToolSpec(f"bad{n}", None, schema) for n in range(2)]
    good = [ToolSpec(f"good{n}", None, GOOD.parameters) for n in range(40)]
    asked = request([*good[:25], *odd_ones, *good[25:]], ToolChoice("required"))
    matcher = held(asked, "hermes")
    for spec in (*odd_ones, *good):
        assert accepts(matcher, call(spec.name, {"x": 4, "n": 1} if spec in odd_ones else {"n": 1}))
        assert not accepts(matcher, call(spec.name, {"x": 4, "n": "1"} if spec in odd_ones else {"n": "1"}))
    assert held(asked, "hermes") is matcher


def test_only_the_tools_that_a_choice_allows_can_be_called() -> None:
    other = ToolSpec("other", None, GOOD.parameters)
    matcher = held(request((GOOD, other), ToolChoice("required", names=frozenset({"good"}))), "hermes")
    assert accepts(matcher, call("good", {"n": 1})) and not accepts(matcher, call("other", {"n": 1}))
    asked = request(choice=ToolChoice("auto", names=frozenset({"write.file"})))
    model = Scripted(sampler(), "hermes")
    assert model.calls(model.write(call(INVENTED, {}), asked).ids) == ["write.file"]
