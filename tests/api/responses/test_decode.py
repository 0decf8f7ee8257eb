"""Wire requests → core Requests."""

from typing import Any

import pytest

from vllm_mlx.api.responses.decode import decode_response
from vllm_mlx.api.responses.schema import SKIPPED_ITEMS, ResponsesBody
from vllm_mlx.api.responses.stored import as_input
from vllm_mlx.api.text import seal
from vllm_mlx.core.errors import Unsupported
from vllm_mlx.core.messages import (
    DocumentPart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)

from .bodies import NAMESPACE, TOOL, conversation, decode, decoded, refusal, spec


def call(name: str, call_id: str = "call_1", **fields: Any) -> Any:
    return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": name, "arguments": "{}", **fields}


def result(output: Any, call_id: str = "call_1") -> Any:
    return {"type": "function_call_output", "id": "fco_1", "call_id": call_id, "output": output}


def test_a_string_is_one_message_of_the_user() -> None:
    assert conversation({"role": "user", "content": "hi"}) == decode().messages


def test_how_the_reply_is_written() -> None:
    spec = decoded(tools=[NAMESPACE], store=False, stream=True, reasoning={"summary": "auto"}).reply
    assert spec.tools.namespaces == {"multi__wait": ("multi", "wait")}
    assert (spec.store, spec.stream, spec.shows_summary, spec.seals_reasoning) == (False, True, True, True)
    assert decoded().reply.store and not decoded().reply.seals_reasoning
    assert decoded(include=["reasoning.encrypted_content"]).reply.seals_reasoning
    assert spec.echo["tools"] == [NAMESPACE] and spec.echo["store"] is False


@pytest.mark.parametrize(
    "item",
    [
        {
            "content": [{"type": "reasoning_text", "text": "why"}],
            "summary": [{"type": "summary_text", "text": "other"}],
        },
        {"encrypted_content": seal("why"), "summary": [{"type": "summary_text", "text": "other"}]},
        {"encrypted_content": "another server's", "summary": [{"type": "summary_text", "text": "why"}]},
    ],
)
def test_reasoning_comes_back_in_whatever_form_the_client_kept_it(item: Any) -> None:
    [message] = conversation({"type": "reasoning", **item})
    assert message == Message("assistant", (ReasoningPart("why"),))


def test_reasoning_that_cannot_be_read_is_left_out() -> None:
    assert conversation({"type": "reasoning", "encrypted_content": "x"}, {"role": "user", "content": "hi"}) == (
        Message("user", (TextPart("hi"),)),
    )


def test_replies_in_a_row_are_one_only_until_something_else_comes() -> None:
    roles = [message.role for message in conversation(call("ls"), result("x"), call("ls"), call("ls", "call_2"))]
    assert roles == ["assistant", "tool", "assistant"]


def test_custom_calls() -> None:
    messages = conversation(
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    )
    assert messages == (
        Message("assistant", (ToolCallPart("c", "apply_patch", {"input": "*** Begin"}),)),
        Message("tool", (ToolResultPart("c", (TextPart("done"),), "apply_patch"),)),
    )


def test_a_custom_tool_is_a_function_of_one_text_to_the_model() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    wire = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar}
    made = decoded(tools=[wire, {"type": "custom", "name": "shell", "format": {"type": "text"}}, TOOL])
    patch, shell, ls = made.request.tools
    described = {"type": "string", "description": 'Text that follows this lark grammar:\nstart: "a"'}
    assert patch.to_openai()["function"] == {
        "name": "apply_patch",
        "description": "Edits.",
        "parameters": {"type": "object", "properties": {"input": described}, "required": ["input"]},
    }
    assert shell.parameters == {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert made.reply.tools.custom == {"apply_patch", "shell"} and ls.name == "ls"
    assert refusal(tools=[{"type": "custom"}]).param == "tools[0].name"


@pytest.mark.parametrize("kind", ["web_search", "tool_search", "file_search", "mcp", "of_tomorrow"])
def test_tools_that_are_no_functions_are_taken_and_not_shown(kind: str) -> None:
    assert [tool.name for tool in decode(tools=[{"type": kind, "name": "x"}, TOOL]).tools] == ["ls"]


@pytest.mark.parametrize("kind", sorted(SKIPPED_ITEMS))
def test_items_of_other_servers_are_skipped(kind: str) -> None:
    assert len(conversation({"type": kind, "id": "x"}, {"role": "user", "content": "hi"})) == 1


@pytest.mark.parametrize(
    ("reasoning", "thinking"),
    [(None, "auto"), ({}, "auto"), ({"effort": "none"}, "off"), ({"effort": "high"}, "on")],
)
def test_effort(reasoning: Any, thinking: str) -> None:
    assert decode(reasoning=reasoning).thinking == thinking


def test_chat_template_kwargs_go_first() -> None:
    request = decode(chat_template_kwargs={"enable_thinking": False}, reasoning={"effort": "high"})
    assert request.thinking == "off"


@pytest.mark.parametrize("is_earlier", [False, True])
def test_an_error_says_whose_item_it_is(is_earlier: bool) -> None:
    bad: Any = {"type": "message", "role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}
    good: Any = {"type": "message", "role": "user", "content": "hi"}
    body = ResponsesBody.model_validate({"input": [good] if is_earlier else [bad], "previous_response_id": "resp_1"})
    earlier = as_input([good, bad] if is_earlier else [good, good])
    with pytest.raises(Unsupported) as caught:
        decode_response(body, spec(reply_id="resp_2"), earlier=earlier)
    place = "previous_response_id.input[1].content[0]" if is_earlier else "input[0].content[0]"
    assert caught.value.param == place and f"`{place}`" in caught.value.message


def test_earlier_items_come_before_the_new_ones() -> None:
    before = as_input(decoded(input="first").kept.items)
    body = ResponsesBody.model_validate({"input": "second", "instructions": "I"})
    again = decode_response(body, spec(reply_id="resp_2"), earlier=before)
    assert again.request.messages is not None
    assert [message.parts[0] for message in again.request.messages] == [
        TextPart("I"),
        TextPart("first"),
        TextPart("second"),
    ]
    assert len(again.kept.items) == 1


def test_files_follow_their_names() -> None:
    link = {"type": "input_file", "file_url": "http://p"}
    data = {"type": "input_file", "file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}
    user, output = decode(input=[{"role": "user", "content": [link]}, result([data], "c")]).messages or ()
    assert user.parts == (DocumentPart("http://p"),)
    files = (TextPart("a.pdf\n"), DocumentPart("data:application/pdf;base64,AA=="))
    assert output.parts == (ToolResultPart("c", files),)


PART = "input[0].content[0]"
IMAGE = {"type": "input_image", "image_url": "http://i"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, f"{PART}.type"),
        ({"input": [{"role": "user", "content": [{**IMAGE, "file_id": "x"}]}]}, PART),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "structural_tag"}}}, "text.format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "ls"}}, "tool_choice"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"name": "ls"}]}, "tools[0].type"),
        ({"include": ["message.output_text.secrets"]}, "include"),
        ({"truncation": "end"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"messages": []}, "messages"),
    ],
)
def test_refusals_name_the_place(fields: Any, param: str) -> None:
    """`tests/golden/refusals.py` has the others."""
    error = refusal(**fields)
    assert error.param == param and error.message
