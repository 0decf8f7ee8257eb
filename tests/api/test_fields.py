"""Every field of OpenAI's is honoured, knowingly ignored, or refused by name."""

from dataclasses import fields
from typing import Any, ClassVar

import pytest
from pydantic import TypeAdapter

from scripts._check_drift.__main__ import PROTOCOLS, _inside, _is_free, _is_wire
from vllm_mlx.api.openai.schema import (
    BODY_FIELDS,
)
from vllm_mlx.api.parameters import GenerationFields, OpenAIFields
from vllm_mlx.api.wire import ANY, Body, ExtraFields, Ignored, Items, Refused, Wire
from vllm_mlx.core.request import SamplingParams

from .bodies import decode, decode_text, refusal

IGNORED = {name: rule for name, rule in BODY_FIELDS.items() if isinstance(rule, Ignored)}
PARTLY_IGNORED = [name for name, rule in IGNORED.items() if ANY not in rule.values]
REFUSED = [name for name, rule in BODY_FIELDS.items() if isinstance(rule, Refused)]


def test_a_field_of_all_endpoints_of_openai_is_a_sampling_parameter() -> None:
    sampling = {each.name for each in fields(SamplingParams)}
    assert OpenAIFields.model_fields.keys() - GenerationFields.model_fields.keys() <= sampling


@pytest.mark.parametrize("name", IGNORED)
def test_a_harmless_value_changes_nothing(name: str) -> None:
    for value in IGNORED[name].values:
        value = {"any": "thing"} if value is ANY else value
        assert decode(**{name: value}) == decode()
        assert decode_text(**{name: value}) == decode_text()


@pytest.mark.parametrize("name", [*PARTLY_IGNORED, *REFUSED])
@pytest.mark.parametrize("decoder", [decode, decode_text])
def test_any_other_value_is_refused_with_advice(name: str, decoder: Any) -> None:
    error = refusal(decoder, **{name: "something else"})
    rule = BODY_FIELDS[name]
    advice = rule.otherwise if isinstance(rule, Ignored) else rule.advice
    assert (error.param, error.code, error.type) == (name, "unsupported_parameter", "invalid_request_error")
    assert f"`{name}`" in error.message and error.message.endswith(advice) and advice.endswith(".")


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("value", [True, {"type": "x"}, ["x"], 0, ""])
def test_a_refused_field_is_refused_with_every_value(name: str, value: Any) -> None:
    assert refusal(decode, **{name: value}).param == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("store", 0),
        ("modalities", ["text", "audio"]),
        ("response_format", {"type": "tree"}),
        ("response_format", {}),
        ("verbosity", "low"),
    ],
)
def test_what_would_change_the_reply_is_refused(field: str, value: Any) -> None:
    assert refusal(decode, **{field: value}).code == "unsupported_parameter"


def test_an_unknown_stream_option_is_refused() -> None:
    error = refusal(decode, stream=True, stream_options={"usage_by_word": True})
    assert error.param == "stream_options.usage_by_word"


CLIENT, TEMPLATE, GRAMMAR = "the client's own", "the chat template reads it", "the compiler of the grammar reads it"
FREE = {  # fields that take any object or value, and who answers for what is inside them
    "CalledFunction.arguments": CLIENT,
    "ToolUseBlock.input": CLIENT,
    "ServerToolUseBlock.input": CLIENT,
    "CallOutputItem.output": CLIENT,
    "AssistantMessage.reasoning_details": CLIENT,
    "AssistantMessage.thinking_blocks": CLIENT,
    **dict.fromkeys(("AllowedTools.tools", "AllowedToolChoice.tools"), "decoding looks for the names of the tools"),
    "ChatCompletionBody.chat_template_kwargs": TEMPLATE,
    "ResponsesBody.chat_template_kwargs": TEMPLATE,
    "ChatFunction.parameters": GRAMMAR,
    "FlatFunction.parameters": GRAMMAR,
    "FunctionTool.parameters": GRAMMAR,
    "MessagesTool.input_schema": GRAMMAR,
    "SchemaFields.schema": GRAMMAR,
    "SchemaFormat.schema": GRAMMAR,
    "Structure.schema": GRAMMAR,
    "TagFields.format": GRAMMAR,
    "ChatFormat.format": GRAMMAR,
    "ChatCompletionBody.guided_json": GRAMMAR,
    "CompletionBody.guided_json": GRAMMAR,
    "StructuredOutputs.json": GRAMMAR,
    **dict.fromkeys(
        (f"StructuredOutputs.{name}" for name in ("choice", "grammar", "regex", "json_object", "enable_in_reasoning")),
        "decoding refuses another type",
    ),
    "ChatFormat.type": "decoding refuses another type",
    "SchemaFormat.type": "decoding refuses another type",
    "ChatCompletionBody.thinking_token_budget": "sampling refuses another type",
    "CompletionBody.thinking_token_budget": "sampling refuses another type",
    "ChatCompletionBody.logit_bias": "decoding refuses a key that is no token id",
    "CompletionBody.logit_bias": "decoding refuses a key that is no token id",
    "ResponsesBody.metadata": "the response repeats it",
    "MessagesBody.mcp_servers": "decoding refuses every server",
}
NOT_LOOKED_AT = {"BuiltInTool", "OtherBlock", "OtherItem"}  # wholly left out, or refused by their type


def test_no_object_is_left_whose_fields_nobody_reads() -> None:
    wires: dict[Any, None] = {}

    def walk(wire: Any) -> None:
        if wire in wires:
            return
        wires[wire] = None
        for each in wire.model_fields.values():
            for inner in _inside(each.annotation, _is_wire):
                walk(inner)

    for _, body in PROTOCOLS.values():
        walk(body)
    free = {
        f"{wire.__name__}.{each.alias or name}"
        for wire in wires
        for name, each in wire.model_fields.items()
        if _is_free(each.annotation)
    }
    assert free == set(FREE) and all(FREE.values())
    assert {wire.__name__ for wire in wires if wire.extras is None} == NOT_LOOKED_AT | {"ResponsesToolChoice"}


class _Counted(Wire):
    extras: ClassVar[ExtraFields | None] = {}
    num_looked: ClassVar[int] = 0

    def extra_rules(self) -> ExtraFields | None:
        _Counted.num_looked += 1
        return self.extras


class _CountedBody(Body):
    items: Items[_Counted]


def test_a_finished_body_is_judged_once_however_often_it_is_validated() -> None:
    form = TypeAdapter(_CountedBody)
    body = form.validate_python({"items": [{}] * 50})
    assert _Counted.num_looked == 50
    assert form.validate_python(body) is body, "as FastAPI does with the instance, on the event loop"
    assert _Counted.num_looked == 50
