"""A shape tells nothing of the texts, and is enough to make a body that is read in the same way."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from vllm_mlx.api.anthropic.schema import MessagesBody
from vllm_mlx.api.openai.schema import ChatCompletionBody, CompletionBody
from vllm_mlx.api.responses.schema import ResponsesBody
from vllm_mlx.api.wire import Wire
from vllm_mlx.server.shapes import FIELDS, WORDS, Shaper, filled, without_quotes

FOLDER = Path(__file__).parents[1] / "api"
KEPT = re.compile(r"^[a-z]+/[a-z]+$|_20[0-9]{6}$")  # media types, and versions of tools
BODIES: dict[str, Any] = {
    "chat": ChatCompletionBody, "completion": CompletionBody, "messages": MessagesBody, "responses": ResponsesBody,
}  # fmt: skip
RECORDED = {name: json.loads((FOLDER / "golden" / f"{name}.request.json").read_text()) for name in BODIES}


def shape(body: Any) -> Any:
    return Shaper(b"salt").shape(body)


def unmarked(value: Any) -> Any:
    """The shape without the marks of equal texts."""
    if isinstance(value, dict):
        return {name: unmarked(inner) for name, inner in value.items() if name != "same"}
    return [unmarked(item) for item in value] if isinstance(value, list) else value


def kinds(wire: Any) -> Any:
    """The structure as the wire types read it: their classes, and the fields that are set."""
    if isinstance(wire, Wire):
        given = sorted(wire.model_fields_set & type(wire).model_fields.keys())
        return type(wire).__name__, {name: kinds(getattr(wire, name)) for name in given}
    if isinstance(wire, list):
        return [kinds(item) for item in wire]
    return type(wire).__name__


def texts(value: Any) -> list[str]:
    match value:
        case dict():
            return [found for inner in value.values() for found in texts(inner)]
        case list():
            return [found for item in value for found in texts(item)]
        case str():
            return [value]
    return []


@pytest.mark.parametrize("name", RECORDED)
def test_a_filled_body_has_the_shape_and_is_read_alike(name: str) -> None:
    body = RECORDED[name]
    made = filled(shape(body))
    assert unmarked(shape(made)) == unmarked(shape(body))
    reader: TypeAdapter[Any] = TypeAdapter(BODIES[name])
    assert kinds(reader.validate_python(made)) == kinds(reader.validate_python(body))


@pytest.mark.parametrize("name", RECORDED)
def test_a_shape_holds_no_text_of_the_client(name: str) -> None:
    kept = set(texts(shape(RECORDED[name])))
    own = {text for text in texts(RECORDED[name]) if text not in WORDS and not KEPT.search(text)}
    assert len(own) > 1 and not own & kept - {""}


SECRET = "Zanzibar-4711"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": SECRET}]},
        {"messages": [{"role": SECRET, "content": [{"type": SECRET, "text": SECRET}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": SECRET, "function": {"name": SECRET, "arguments": json.dumps({SECRET: SECRET})}}]}]},
        {"tools": [{"type": "function", "function": {"name": SECRET, "description": SECRET, "parameters": {
            "type": "object", "title": SECRET, "required": [SECRET], "properties": {
                SECRET: {"type": "string", "enum": [SECRET], "default": SECRET, "pattern": SECRET, "const": 4711}}}}}]},
        {"metadata": {SECRET: SECRET}, "user": SECRET, "model": SECRET, "cache_salt": SECRET, "stop": [SECRET]},
        {"unknown": {SECRET: {"type": SECRET, SECRET: 4711}}, "unknown_text": SECRET, "stop_token_ids": [4711]},
        {"prompt": [4711, 4711], "logit_bias": {"4711": 1}, "guided_json": {"const": SECRET}, "guided_regex": SECRET},
        {"input": [{"type": "custom_tool_call", "call_id": SECRET, "name": SECRET, "input": SECRET}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": SECRET}}]}], "system": SECRET},
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SECRET}"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": f"https://{SECRET}/?t={SECRET}"}]}]},
        {SECRET: 1, "a b " + SECRET: 1, "x": f"data:{SECRET};base64,AA"},
        SECRET, [SECRET], {"chat_template_kwargs": {SECRET: True, "number": 4711, "ratio": 47.11}},
    ],
)  # fmt: skip
def test_nothing_of_a_secret_is_left(body: Any) -> None:
    found = json.dumps(shape(body))
    known = "Zanzibar-4711" if isinstance(body, dict) and SECRET in body else None  # an unknown field's own name stays
    assert (found.replace(known, "") if known else found).count("Zanzibar") == 0
    assert "4711" not in (found.replace(known, "") if known else found) and "47.11" not in found


def test_names_and_equal_texts_stay_equal() -> None:
    body = {
        "tools": [{"name": "ls", "input_schema": {"type": "object", "properties": {"path": {}}, "required": ["path"]}}],
        "tool_choice": {"type": "tool", "name": "ls"},
        "messages": [{"role": "user", "content": "again and again"}] * 2
        + [{"role": "user", "content": "other words ..."}],
    }
    made = filled(shape(body))
    [tool] = made["tools"]
    assert tool["name"] == made["tool_choice"]["name"] != "ls"
    assert list(tool["input_schema"]["properties"]) == tool["input_schema"]["required"] != ["path"]
    first, second, third = (message["content"] for message in made["messages"])
    assert first == second != third and len(first) == len(third) == 15


def test_another_salt_marks_texts_otherwise() -> None:
    assert Shaper(b"one").shape("a text") != Shaper(b"two").shape("a text")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(sorted(FIELDS)), inner),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_any_body_has_a_shape_that_can_be_filled(body: Any) -> None:
    made = shape(json.loads(json.dumps(body)))
    again = filled(json.loads(json.dumps(made)))
    assert json.dumps(unmarked(shape(again))) == json.dumps(unmarked(made))


@given(st.text(min_size=1))
def test_a_filled_text_has_the_same_length_in_characters_and_bytes(text: str) -> None:
    made = filled(shape({"content": text}))["content"]
    assert (len(made), len(made.encode())) == (len(text), len(text.encode()))


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (
            "`messages[0].content[1].type` 'smell' is not supported.",
            "`messages[0].content[1].type` '…' is not supported.",
        ),
        ("The model `Zanzibar` does not exist.", "The model `…` does not exist."),
        ("`max_tokens` must be an integer.", "`max_tokens` must be an integer."),
    ],
)
def test_an_error_keeps_the_protocols_own_words(message: str, kept: str) -> None:
    assert without_quotes(message) == kept
