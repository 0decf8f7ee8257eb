"""The same conversation means the same in all protocols, also where a client writes it in another one's form."""

from typing import Any

import pytest

from vllm_mlx.core.messages import ImagePart, Message, TextPart, ToolCallPart, ToolChoice, ToolResultPart

from . import bodies
from .anthropic import bodies as messages
from .bodies import chat
from .responses import bodies as responses

HI: Any = {"role": "user", "content": "hi"}
FLAT: Any = {"type": "function", "name": "ls", "parameters": {"type": "object"}}


def conversation(*wire: Any, **fields: Any) -> tuple[Message, ...]:
    found = chat(messages=list(wire), **fields).messages
    assert found is not None
    return found


def refusal(**fields: Any) -> Any:
    return bodies.refusal(bodies.decode, **fields)


def test_an_empty_list_of_tools_is_none() -> None:
    for decode in (chat, messages.decode, responses.decode):
        assert decode(tools=[]).tools == ()
    for choice in ("auto", "none", None):
        assert chat(tools=[], tool_choice=choice).tool_choice == ToolChoice("none")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_limit_of_tokens(name: str) -> None:
    assert chat(**{name: -1}) == chat()
    assert responses.decode(max_output_tokens=-1).sampling.max_tokens is None
    for wrong in (0, -2, -1.0, True):
        assert refusal(**{name: wrong}).param == name


def test_parts_of_responses_in_a_chat() -> None:
    image = {"type": "input_image", "image_url": "data:,x", "detail": "low"}
    said = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]
    asked = [{"type": "input_text", "text": "b"}, image]
    system, assistant, user, tool = conversation(
        {"role": "developer", "content": [{"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": said, "tool_calls": [{"id": "t", "function": {"name": "ls"}}]},
        {"role": "user", "content": asked},
        {"role": "tool", "tool_call_id": "t", "content": asked},
    )
    parts = responses.conversation({"role": "user", "content": asked})[0].parts
    assert system.parts == (TextPart("c"),) and assistant.parts[0] == TextPart("a") and user.parts == parts
    assert tool.parts == (ToolResultPart("t", parts, "ls"),)
    [_, shown] = user.parts
    assert isinstance(shown, ImagePart) and shown.param == "messages[2].content[1].image_url"
    wrong = [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]
    assert refusal(messages=wrong).param == "messages[0].content[0]"


def test_tools_and_a_choice_in_the_flat_form_beside_messages() -> None:
    request = chat(tools=[FLAT], tool_choice={"type": "function", "name": "ls"})
    assert [tool.name for tool in request.tools] == ["ls"] and request.tool_choice == ToolChoice("required", "ls")
    assert refusal(tools=[FLAT], tool_choice={"type": "function", "name": "no"}).param == "tool_choice"
    assert refusal(tools=[FLAT], tool_choice={"type": "function"}).param == "tool_choice"


def test_a_result_without_content() -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "t", "function": {"name": "ls"}}]}
    assert conversation(call, {"role": "tool", "tool_call_id": "t", "content": None})[1].parts[0].content == ()
    item = {"type": "function_call", "call_id": "t", "name": "ls"}
    for output, text in ((None, ""), ({"a": ["ü"]}, '{"a": ["ü"]}'), ({}, "{}")):
        result = {"type": "function_call_output", "call_id": "t", "output": output}
        assert responses.conversation(item, result)[1].parts == (ToolResultPart("t", (TextPart(text),), "ls"),)


def pairs(found: tuple[Message, ...]) -> list[tuple[str, str | None]]:
    """The name of the call that each result has, by its id and by its own name."""
    parts = [part for message in found for part in message.parts]
    names = {part.call_id: part.name for part in parts if isinstance(part, ToolCallPart)}
    return [(names.get(part.call_id, ""), part.name) for part in parts if isinstance(part, ToolResultPart)]


@pytest.mark.parametrize("ids", [(None, None), ("", ""), (None, "call_0"), ("x", None)])
def test_a_call_without_an_id_takes_the_next_result(ids: Any) -> None:
    of_call, of_result = ids
    turn = [
        {"role": "assistant", "tool_calls": [{"id": of_call, "function": {"name": "a"}}]},
        {"role": "tool", "tool_call_id": of_result, "content": "1"},
    ]
    both = {"role": "assistant", "tool_calls": [{"function": {"name": "b"}}, {"id": "y", "function": {"name": "c"}}]}
    answers = [{"role": "tool", "tool_call_id": "y", "content": "2"}, {"role": "tool", "content": "3"}]
    assert pairs(conversation(*turn, both, *answers)) == [("a", "a"), ("c", "c"), ("b", "b")]
    items = [
        {"type": "function_call", "call_id": of_call, "name": "a"},
        {"type": "function_call_output", "call_id": of_result, "output": "1"},
    ]
    assert pairs(responses.conversation(*items)) == [("a", "a")]
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": of_call or "", "name": "a", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": of_result or "", "content": "1"}]},
    ]
    assert pairs(messages.conversation(*blocks)) == [("a", "a")]


def test_a_result_that_belongs_to_no_call() -> None:
    assert pairs(conversation(HI, {"role": "tool", "tool_call_id": "t", "content": "x"})) == [("", None)]
    error = refusal(messages=[HI, {"role": "tool", "content": "x"}])
    assert (error.param, error.code) == ("messages[1].tool_call_id", "missing_required_parameter")
    assert responses.refusal(input=[{"type": "function_call_output", "output": "x"}]).param == "input[0].call_id"
    assert "`messages[0].content[0].tool_use_id` is required." in messages.refusal(
        messages=[{"role": "user", "content": [{"type": "tool_result"}]}]
    )
