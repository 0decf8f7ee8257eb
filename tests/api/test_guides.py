"""What clients of all protocols say of a reply's form becomes one core value."""

from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.messages import ToolChoice
from vllm_mlx.core.request import (
    Choice,
    Grammar,
    Guide,
    JsonSchema,
    Regex,
    Request,
    StructuralFormat,
    StructuralTag,
    TagStructure,
)

from .anthropic.bodies import decode as decode_message
from .bodies import chat, completion
from .responses.bodies import decode as response

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "ls", "parameters": {"type": "object"}}


def message(**fields: Any) -> Request:
    return decode_message(max_tokens=3000, **fields)


def guide(form: Any, param: str, **fields: Any) -> Guide:
    return Guide(form=form, param=param, **fields)


TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
PARSED_TAG = StructuralTag((TagStructure("<f>", SCHEMA, "</f>"),), ("<f",))


@pytest.mark.parametrize("decode", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, guide(JsonSchema({"type": "object"}), "response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            guide(JsonSchema(SCHEMA), "response_format.json_schema.schema"),
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, guide(PARSED_TAG, "response_format")),
        (
            {"structured_outputs": {"json": '{"type": "null"}'}},
            guide(JsonSchema({"type": "null"}), "structured_outputs.json"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, guide(Regex("a+"), "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, guide(Choice(("a", "b")), "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "start: A"}}, guide(Grammar("start: A"), "structured_outputs.grammar")),
        ({"structured_outputs": {"structural_tag": TAG}}, guide(PARSED_TAG, "structured_outputs.structural_tag")),
        (
            {"structured_outputs": {"regex": "a", "enable_in_reasoning": True}},
            guide(Regex("a"), "structured_outputs.regex", in_reasoning=True),
        ),
        (
            {"structured_outputs": {"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'}},
            guide(StructuralFormat({"type": "any_text"}), "structured_outputs.structural_tag"),
        ),
        ({"guided_choice": ["a"]}, guide(Choice(("a",)), "guided_choice")),
        ({"guided_json": SCHEMA}, guide(JsonSchema(SCHEMA), "guided_json")),
    ],
)
def test_both_endpoints_of_openai(decode: Any, fields: dict[str, Any], expected: Guide | None) -> None:
    assert decode(**fields).sampling.guide == expected


@pytest.mark.parametrize("value", ["yes", "true", 1, [], {"a": True}])
def test_enable_in_reasoning_is_true_or_false(value: Any) -> None:
    for decode in (chat, completion):
        with pytest.raises(InvalidParameter, match="must be true or false") as caught:
            decode(structured_outputs={"regex": "a", "enable_in_reasoning": value})
        assert caught.value.param == "structured_outputs.enable_in_reasoning"


def test_messages_and_responses() -> None:
    format_ = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    expected = JsonSchema(SCHEMA)
    assert message(output_config={"format": format_}).sampling.guide == guide(expected, "output_config.format.schema")
    assert message(output_format=format_).sampling.guide == guide(expected, "output_format.schema")
    assert response(text={"format": format_}).sampling.guide == guide(expected, "text.format.schema")


def test_choices_that_force_a_call() -> None:
    openai = {"tools": [{"type": "function", "function": TOOL}]}
    flat = {"tools": [{"type": "function", **TOOL}]}
    custom = {"tools": [{"name": "ls", "input_schema": {"type": "object"}}]}
    named = {"type": "function", "function": {"name": "ls"}}
    assert chat(**openai, tool_choice="required").tool_choice == ToolChoice("required")
    assert chat(**openai, tool_choice=named).tool_choice == ToolChoice("required", "ls")
    assert response(**flat, tool_choice="required").tool_choice == ToolChoice("required")
    assert response(**flat, tool_choice={"type": "function", "name": "ls"}).tool_choice == ToolChoice("required", "ls")
    assert message(**custom, tool_choice={"type": "any"}).tool_choice == ToolChoice("required")
    one = message(**custom, tool_choice={"type": "tool", "name": "ls", "disable_parallel_tool_use": True})
    assert (one.tool_choice, one.max_tool_calls) == (ToolChoice("required", "ls"), 1)


@row("S3-1", "S3-15")
def test_budgets() -> None:
    assert chat(thinking_token_budget=0).sampling.thinking_token_budget == 0
    assert completion(thinking_token_budget=-1).sampling.thinking_token_budget == -1
    assert chat(chat_template_kwargs={"thinking_token_budget": 7}).thinking_limit == 7
    assert response(chat_template_kwargs={"thinking_budget": 7}).thinking_limit == 7
    assert chat(chat_template_kwargs={"thinking_budget": -1}).thinking_limit is None
    assert message(thinking={"type": "enabled", "budget_tokens": 2000}).thinking_limit == 2000


@pytest.mark.parametrize("name", ["structures", "triggers"])
def test_parts_of_a_structural_tag_are_counted_before_they_are_compared(name: str) -> None:
    num = 1025
    tag = {**TAG, name: TAG[name] * num}
    with pytest.raises(InvalidParameter, match=f"at most 1024 {name}"):
        chat(structured_outputs={"structural_tag": tag})
