"""The types of a tool's arguments are read once, within a bound, whatever its schema refers to."""

import json
from typing import Any

import pytest

from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.events import ToolCallDelta
from vllm_mlx.formats import SchemaBudget, read_schemas
from vllm_mlx.formats.bodies.tool_schema import STRING, ToolSchema

from .support import run

WIDTH = 30


def folded(width: int, leaf: Any) -> dict[str, Any]:
    """Seven definitions, each with `width` references to the next: width ** 6 ways lead to the last one."""
    definitions: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * width} for i in range(6)}
    return {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/d0"}},
        "$defs": {**definitions, "d6": leaf},
    }


def num_visits(schema: Any) -> int:
    budget = SchemaBudget()
    ToolSchema(schema, budget)
    return budget.num_visits


def test_each_definition_is_visited_once() -> None:
    assert num_visits(folded(WIDTH, {"type": "string"})) < 12 * WIDTH
    assert ToolSchema(folded(WIDTH, {"type": "integer"})).types("city") == {"integer"}


def test_reading_a_reply_visits_no_schema() -> None:
    budget = SchemaBudget()
    schemas = read_schemas([("get_weather", folded(WIDTH, {"type": "string"}), "tools[0]")], budget)
    spent = budget.num_visits
    text = "<tool_call><function=get_weather><parameter=city>\n{0}\n</parameter></function></tool_call>" * 3
    events = run([text], tools="qwen3_xml", schemas=schemas)
    assert [json.loads(each.arguments) for each in events if isinstance(each, ToolCallDelta)] == [{"city": "{0}"}] * 3
    assert budget.num_visits == spent


def test_elements_inside_of_arguments_visit_no_schema() -> None:
    place = {"properties": {"zip": {"$ref": "#/$defs/text"}, "stops": {"items": {"$ref": "#/$defs/text"}}}}
    parameters = {
        "properties": {"place": {"$ref": "#/$defs/place"}},
        "$defs": {"place": place, "text": {"type": "string"}},
    }
    budget = SchemaBudget()
    schemas = read_schemas([("go", parameters, "tools[0]")], budget)
    spent = budget.num_visits
    tag = "]<]minimax[>["
    inner = f"{tag}<zip>1{tag}</zip>{tag}<stops>{tag}<item>2{tag}</item>{tag}</stops>"
    call = f'{tag}<tool_call>{tag}<invoke name="go">{tag}<place>{inner}{tag}</place>{tag}</invoke>{tag}</tool_call>'
    [_, delta, _] = run([call], tools="minimax_m3", schemas=schemas)
    assert json.loads(delta.arguments) == {"place": {"zip": "1", "stops": ["2"]}}
    assert budget.num_visits == spent


def test_all_tools_of_a_request_share_one_bound() -> None:
    tools = [(f"tool{n}", {"properties": {"a": {"enum": list(range(60))}}}, f"tools[{n}].parameters") for n in range(9)]
    with pytest.raises(InvalidParameter, match="at most 300 visits") as caught:
        read_schemas(tools, SchemaBudget(300))
    assert caught.value.param == "tools[4].parameters"
    read_schemas(tools[:4], SchemaBudget(300))


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"$ref": "#/$defs/loop"}, None),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/tree"}]}, None),
        ({"allOf": [{"type": "string"}, {"$ref": "#/$defs/loop"}]}, STRING),
        ({"$ref": "#/properties/p"}, None),
    ],
)
def test_what_refers_to_itself_says_nothing(schema: Any, types: Any) -> None:
    definitions = {"loop": {"$ref": "#/$defs/loop"}, "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "string"}]}}
    assert ToolSchema({"properties": {"p": schema}, "$defs": definitions}).types("p") == types


def test_a_long_chain_of_references_says_nothing() -> None:
    definitions: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5000)}
    schema = {"properties": {"p": {"$ref": "#/$defs/d0"}}, "$defs": {**definitions, "d5000": {"type": "string"}}}
    assert ToolSchema(schema).types("p") is None


@pytest.mark.parametrize("odd", [5, "x", None, [1], {"properties": 5}, {"properties": {"p": 7}}, {"properties": [1]}])
def test_what_is_no_schema_says_nothing(odd: Any) -> None:
    assert ToolSchema(odd).types("p") is None
    assert ToolSchema(odd).child("p") == {}


def test_a_schema_of_great_depth_is_read() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(900):
        schema = {"properties": {"p": schema}, "anyOf": [schema]}
    assert ToolSchema(schema).types("p") is None
