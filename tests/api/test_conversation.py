"""Wire messages and tools → core values."""

from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.core.messages import (
    DocumentPart,
    ImagePart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    VideoPart,
)

from .bodies import chat, decode, refusal


def messages(*wire: dict[str, Any]) -> tuple[Message, ...]:
    decoded = chat(messages=list(wire)).messages
    assert decoded is not None
    return decoded


def call(arguments: Any, call_id: str = "c1", name: str = "ls") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **fields}


@row("S0-16")
def test_a_tool_conversation_keeps_order_roles_and_whitespace() -> None:
    assert messages(
        {"role": "developer", "content": "Be short.\n"},
        {
            "role": "user",
            "content": [{"type": "text", "text": " list "}, {"type": "text", "text": "it"}],
            "name": "Ann",
        },
        {
            "role": "assistant",
            "content": "\nSure.",
            "reasoning_content": "I should look.\n",
            "tool_calls": [call('{"b": 1, "a": [2]}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "file\n"},
        {"role": "system", "content": "Now in the middle."},
    ) == (
        Message("system", (TextPart("Be short.\n"),)),
        Message("user", (TextPart(" list "), TextPart("it")), "Ann"),
        Message(
            "assistant",
            (ReasoningPart("I should look.\n"), TextPart("\nSure."), ToolCallPart("c1", "ls", {"b": 1, "a": [2]})),
        ),
        Message("tool", (ToolResultPart("c1", (TextPart("file\n"),), "ls"),)),
        Message("system", (TextPart("Now in the middle."),)),
    )


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_both_names_of_the_reasoning_are_read(name: str) -> None:
    [message] = messages(assistant(content="x", **{name: "why"}))
    assert message.parts == (ReasoningPart("why"), TextPart("x"))


@row("S4-22")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("  ", {}),
        (None, {}),
        ("null", {}),
        ("{}", {}),
        ({"a": 1}, {"a": 1}),
        ('{"path": "/tm', {"_raw": '{"path": "/tm'}),
        ("[1]", {"_raw": "[1]"}),
        ("5", {"_raw": "5"}),
        ("[" * 100_000, {"_raw": "[" * 100_000}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
    ],
)
def test_arguments_of_past_calls_never_fail(arguments: Any, expected: dict[str, Any]) -> None:
    [message] = messages(assistant(tool_calls=[call(arguments)]))
    assert message.parts == (ToolCallPart("c1", "ls", expected),)


def test_a_result_is_named_after_the_latest_call_with_its_id() -> None:
    decoded = messages(
        assistant(tool_calls=[call("{}", "call_0", "ls")]),
        {"role": "tool", "tool_call_id": "call_0", "content": "a"},
        assistant(tool_calls=[call("{}", "call_0", "cat")]),
        {"role": "tool", "tool_call_id": "call_0", "content": [{"type": "text", "text": "b"}]},
        {"role": "tool", "tool_call_id": "lost", "content": "c", "name": "given"},
        {"role": "tool", "tool_call_id": "lost", "content": "d"},
    )
    results = [message.parts[0] for message in decoded if message.role == "tool"]
    assert [result.name for result in results if isinstance(result, ToolResultPart)] == ["ls", "cat", "given", None]


def test_images_and_refusals() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    assert messages(
        {"role": "user", "content": [picture, {"type": "text", "text": "what?"}]},
        assistant(content=[{"type": "refusal", "refusal": "No."}]),
        assistant(refusal="Never."),
    ) == (
        Message("user", (ImagePart("data:image/png;base64,AA==", max_side=512), TextPart("what?"))),
        Message("assistant", (TextPart("No."),)),
        Message("assistant", (TextPart("Never."),)),
    )


@pytest.mark.parametrize(
    ("image", "part"),
    [
        ({"url": "http://i"}, ImagePart("http://i")),
        ({"url": "http://i", "detail": None}, ImagePart("http://i")),
        ({"url": "http://i", "detail": "auto"}, ImagePart("http://i")),
        ({"url": "http://i", "detail": "high"}, ImagePart("http://i")),
        ({"url": "http://i", "detail": "original"}, ImagePart("http://i")),
        ({"url": "http://i", "detail": "low"}, ImagePart("http://i", max_side=512)),
        ("http://i", ImagePart("http://i")),
    ],
)
def test_detail_is_how_large_an_image_is_shown(image: Any, part: ImagePart) -> None:
    content = [{"type": "image_url", "image_url": image}]
    tool = {"role": "tool", "tool_call_id": "c", "content": content}
    shown, result = messages({"role": "user", "content": content}, tool)
    assert shown.parts == (part,)
    assert isinstance(result.parts[0], ToolResultPart) and result.parts[0].content == (part,)


@pytest.mark.parametrize("data", ["JVBERi0=", "data:application/pdf;base64,JVBERi0="])
def test_a_file_follows_its_name(data: str) -> None:
    content = [{"type": "file", "file": {"filename": "a.pdf", "file_data": data}}]
    [message] = messages({"role": "user", "content": content})
    url = data if data.startswith("data:") else f"data:;base64,{data}"
    assert message.parts == (TextPart("a.pdf\n"), DocumentPart(url))


def test_what_client_libraries_send_back_is_accepted() -> None:
    echoed = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning": None,
        "reasoning_content": None,
    }
    cached = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert messages(echoed, {"role": "user", "content": [cached]}) == (
        Message("assistant", (TextPart("x"),)),
        Message("user", (TextPart("hi"),)),
    )


PART = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, f"{PART}.file"),
        ({"role": "user", "content": [{"text": "x"}]}, f"{PART}.type"),
        ({"role": "user", "content": [{"type": "text"}]}, f"{PART}.text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, f"{PART}.image_url.url"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}, f"{PART}.mood"),
        ({"role": "user", "content": "x", "mood": 1}, "messages[0].mood"),
        ({"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, f"{PART}.type"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "function_call": {"name": "ls"}}, "messages[0].function_call"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}, "messages[0].tool_calls[0].function.name"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
    ],
)
def test_a_wrong_message_is_refused_by_the_place_of_the_fault(message: dict[str, Any], param: str) -> None:
    error = refusal(decode, messages=[message])
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert f"`{param}`" in error.message


def test_a_video_without_a_frame_rate_has_the_one_of_the_request_and_its_own_place() -> None:
    video = {"type": "video_url", "video_url": "http://v"}
    content = [video, {**video, "fps": 2.0}, {"type": "video", "video": ["a"]}, video]
    request = chat(messages=[{"role": "user", "content": content}], mm_processor_kwargs={"fps": 3.0})
    assert request.messages is not None
    videos = [part for part in request.messages[0].parts if isinstance(part, VideoPart)]
    assert [part.fps for part in videos] == [3.0, 2.0, 3.0, 3.0]
    names = ["video_url", "video_url", "video", "video_url"]
    assert [part.param for part in videos] == [f"messages[0].content[{at}].{name}" for at, name in enumerate(names)]
