"""What a grammar costs is bounded before it is written: alternatives, references, and odd values in schemas."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.named_formats import required_calls
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.messages import ToolSpec
from vllm_mlx.core.request import Guide, StructuralFormat
from vllm_mlx.formats import SchemaBudget
from vllm_mlx.formats.family import NO_HEADER
from vllm_mlx.formats.tokenizer import AddedTokens
from vllm_mlx.guidance.grammars import GuidedTool, guide_grammar
from vllm_mlx.guidance.grammars.json_schema import checked_schema
from vllm_mlx.guidance.grammars.lark import LarkWriter
from vllm_mlx.guidance.grammars.shapes import MAX_SHAPES

from ..formats.test_tool_schema import WIDTH, folded
from .random_sampler import sampler

FORMATS = ("qwen3_xml", "minimax_m3", "gemma4", "lfm2", "hermes", "deepseek_v32")
SPLIT = ("qwen3_xml", "minimax_m3", "gemma4", "lfm2")  # with a place of their own for each argument


def written(name: str, *schemas: dict[str, Any], budget: SchemaBudget | None = None) -> str:
    """The grammar of forced calls to tools with these parameters."""
    writer = LarkWriter(AddedTokens({}), budget)
    specs = [ToolSpec(f"f{number}", None, schema) for number, schema in enumerate(schemas)]
    tools = [
        GuidedTool.of(spec, f"tools[{number}]", is_strict=True, budget=writer.budget)
        for number, spec in enumerate(specs)
    ]
    return required_calls(tools, name, writer, NO_HEADER, None)


@pytest.mark.parametrize("name", SPLIT)
def test_alternatives_that_multiply_are_counted_before_they_are_written(name: str) -> None:
    schema = {"properties": {"a": {"type": "string"}}, "anyOf": [{}] * 1000, "oneOf": [{}] * 1000}
    budget = SchemaBudget()
    with pytest.raises(InvalidParameter, match=f"more than the {MAX_SHAPES} alternatives") as caught:
        written(name, schema, budget=budget)
    assert caught.value.param == "tools[0].anyOf"
    assert budget.num_visits < 15_000


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"oneOf": [{}] * 9}] * 8},
        {"allOf": [{"anyOf": [{}] * 9}] * 8},
        {"oneOf": [{"anyOf": [{"oneOf": [{}] * 5}] * 5}] * 5},
        {"anyOf": [{"anyOf": [{}] * 10**5, "oneOf": [False]}, *[{}] * 65]},
    ],
)
def test_alternatives_at_every_depth_count(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=r"alternatives|visits"):
        written("qwen3_xml", schema)


def test_as_many_alternatives_as_are_allowed_are_written() -> None:
    branches = [{"properties": {f"p{n}": {"type": "integer"}}, "required": [f"p{n}"]} for n in range(8)]
    schema = {"anyOf": branches, "oneOf": [{"properties": {f"q{n}": {"type": "boolean"}}} for n in range(8)]}
    grammar = written("qwen3_xml", schema)
    assert all(f"p{n}" in grammar and f"q{n}" in grammar for n in range(8))


def test_an_alternative_that_nothing_satisfies_is_left_out() -> None:
    grammar = written("qwen3_xml", {"anyOf": [{"properties": {"a": {"type": "integer"}}}, False]})
    assert grammar == written("qwen3_xml", {"properties": {"a": {"type": "integer"}}})
    with pytest.raises(InvalidParameter, match="allows no arguments"):
        written("qwen3_xml", {"anyOf": [False]})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("leaf", [{"type": "string"}, {"type": ["string", "integer"]}, {"type": "array", "items": {}}])
def test_definitions_are_written_once_however_many_refer_to_them(name: str, leaf: dict[str, Any]) -> None:
    budget = SchemaBudget()
    written(name, folded(WIDTH, leaf), budget=budget)
    assert budget.num_visits < 6000


@pytest.mark.parametrize("name", SPLIT)
def test_arguments_without_number_are_visited_in_proportion(name: str) -> None:
    def visits(num: int) -> int:
        budget = SchemaBudget()
        names = [f"p{n}" for n in range(num)]
        schema = {"properties": {key: {"type": "string"} for key in names}, "required": names, "$defs": {"d": {}}}
        written(name, schema, budget=budget)
        return budget.num_visits

    assert visits(800) < 4.5 * visits(200)


def test_a_property_is_copied_once() -> None:
    """`kept` is what is copied: as many entries as the schema has, however many children it has."""
    schema = {"properties": {f"p{n}": {"type": "string"} for n in range(3000)}}
    copies: list[int] = []

    class Counting(dict[str, Any]):
        def items(self) -> Any:
            copies.append(len(self))
            return super().items()

    assert checked_schema({"properties": Counting(schema["properties"])}, "s") == schema
    assert sum(copies) <= 3 * 3000


def test_all_tools_share_one_bound() -> None:
    schema = {"properties": {f"p{n}": {"type": "string", "enum": ["a", "b"]} for n in range(40)}}
    written("qwen3_xml", *[schema] * 20)
    with pytest.raises(InvalidParameter, match="at most 3000 visits"):
        written("qwen3_xml", *[schema] * 20, budget=SchemaBudget(3000))


def test_definitions_repeated_with_every_argument_are_paid_for() -> None:
    definitions = {"big": {"description": "x" * 100_000}}
    properties = {f"p{n}": {"items": {"$ref": "#/$defs/big"}, "title": str(n)} for n in range(1000)}
    with pytest.raises(InvalidParameter, match="visits"):
        written("qwen3_xml", {"properties": properties, "$defs": definitions})


def test_structural_tags_pay_for_their_triggers() -> None:
    tags = [{"begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}] * 1000
    form = StructuralFormat({"type": "triggered_tags", "triggers": ["<"] * 1000, "tags": tags})
    with pytest.raises(InvalidParameter, match="visits"):
        guide_grammar(Guide(form=form), sampler().writer())


def _odd() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"properties": 5}, "tools[0].properties"
    yield {"anyOf": [{"properties": [1]}]}, "tools[0].anyOf[0].properties"
    yield {"properties": {"a": {"type": "string", "format": ["x"]}}}, "tools[0].properties.a.format"
    yield {"required": [["a"]]}, "tools[0].required"
    yield {"required": "a"}, "tools[0].required"
    yield {"anyOf": []}, "tools[0].anyOf"
    yield {"properties": {"a": {"enum": []}}}, "tools[0].properties.a.enum"
    yield {"properties": {"a": {"enum": 5}}}, "tools[0].properties.a.enum"
    yield {"properties": {"a": {"type": "string", "minLength": "x"}}}, "tools[0].properties.a.minLength"
    yield {"properties": {"a": {"type": "string", "maxLength": -1}}}, "tools[0].properties.a.maxLength"
    yield {"properties": {"a": {"type": "string", "maxLength": float("inf")}}}, "tools[0].properties.a.maxLength"
    yield {"properties": {"a": {"type": "string", "pattern": 5}}}, "tools[0].properties.a.pattern"
    yield {"properties": {"a": {"type": "integer", "minimum": float("nan")}}}, "tools[0].properties.a.minimum"
    yield {"properties": {"a": {"type": [["string"]]}}}, "tools[0].properties.a.type"
    yield {"properties": {"a": {"$ref": 5}}}, "tools[0].properties.a.$ref"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("schema", "place"), _odd(), ids=lambda value: value if isinstance(value, str) else "")
def test_odd_values_are_refused_by_their_place(name: str, schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        written(name, schema)
    assert caught.value.param == place


@pytest.mark.parametrize("name", ["qwen3_xml", "minimax_m3", "gemma4"])
def test_a_union_of_itself_is_refused(name: str) -> None:
    union = {"type": ["string", "integer"], "anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}
    with pytest.raises(InvalidParameter, match="refers to itself") as caught:
        written(name, {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": union}})
    assert caught.value.param == "tools[0].properties.x"
