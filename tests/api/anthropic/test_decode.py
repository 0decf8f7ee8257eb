"""Wire requests → core Requests."""

from typing import Any

import pytest

from vllm_mlx.api.anthropic.decode import MAX_INTRODUCED_CHARS
from vllm_mlx.api.text import seal
from vllm_mlx.core.messages import (
    DocumentPart,
    ImagePart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)

from .bodies import HI, TOOL, conversation, decode, decoded, refusal


def test_a_string_is_one_text() -> None:
    text = [{"type": "text", "text": "hi"}]
    for role in ("user", "assistant", "system"):
        assert conversation({"role": role, "content": "hi"}) == conversation({"role": role, "content": text})
    assert decode(system="hi") == decode(system=text)


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, "auto"),
        ({"type": "disabled"}, "off"),
        ({"type": "adaptive", "display": "updates"}, "auto"),
        ({"type": "between_tools"}, "auto"),
        ({"type": "enabled", "budget_tokens": 1024}, "on"),
    ],
)
def test_thinking(thinking: Any, expected: str) -> None:
    assert decode(thinking=thinking, max_tokens=2000).thinking == expected


@pytest.mark.parametrize(
    ("thinking", "asked", "always"),
    [
        (None, "hidden", "visible"),
        ({"type": "disabled"}, "hidden", "visible"),
        ({"type": "disabled", "display": "omitted"}, "hidden", "sealed"),
        ({"type": "adaptive"}, "visible", "visible"),
        ({"type": "adaptive", "display": "updates"}, "visible", "visible"),
        ({"type": "adaptive", "display": "omitted"}, "sealed", "sealed"),
        ({"type": "between_tools"}, "visible", "visible"),
        ({"type": "enabled", "budget_tokens": 1024}, "visible", "visible"),
    ],
)
def test_who_gets_thinking_blocks(thinking: Any, asked: str, always: str) -> None:
    fields: Any = {"thinking": thinking, "max_tokens": 2000}
    assert decoded(**fields).reply.thinking == asked
    assert decoded(messages_thinking="always", **fields).reply.thinking == always


def test_omitted_thinking_comes_back_inside_the_signature() -> None:
    hidden = {"type": "thinking", "thinking": "", "signature": seal("why\n")}
    empty = {"type": "thinking", "thinking": "", "signature": "another"}
    [message] = conversation({"role": "assistant", "content": [hidden, empty]})
    assert message.parts == (ReasoningPart("why\n"),)


def test_a_reply_that_the_client_began_is_gone_on_with() -> None:
    begun = decode(messages=[*HI, {"role": "assistant", "content": "{"}])
    assert begun.continue_final_message and not begun.add_generation_prompt
    call = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {}}
    for content in ("", [], [call]):
        whole = decode(messages=[*HI, {"role": "assistant", "content": content}])
        assert whole.add_generation_prompt and not whole.continue_final_message


def test_content_of_results() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    found = {
        "type": "search_result",
        "source": "http://a",
        "title": "A",
        "content": [{"type": "text", "text": "is a"}],
        "citations": {"enabled": False},
    }
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}
    [message] = conversation(
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "other", "content": [picture, found, document]},
            ],
        }
    )
    content = (ImagePart("data:image/png;base64,AA=="), TextPart("A\nhttp://a\nis a"), TextPart("words"))
    assert message == Message("tool", (ToolResultPart("other", content),))
    [empty] = conversation({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]})
    assert empty == Message("tool", (ToolResultPart("x", ()),))


def test_documents_and_images() -> None:
    inner = [{"type": "text", "text": "one"}, {"type": "image", "source": {"type": "url", "url": "http://i"}}]
    document = {"type": "document", "title": "T", "context": "C", "source": {"type": "content", "content": inner}}
    [message] = conversation({"role": "user", "content": [document, {"type": "text", "text": "sum up"}]})
    assert message.parts == (TextPart("T\nC"), TextPart("one"), ImagePart("http://i"), TextPart("sum up"))


def test_a_file_follows_its_title_and_context() -> None:
    link = {"type": "document", "source": {"type": "url", "url": "http://p"}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [{**PDF, "title": "T", "context": "C"}]}
    tool, user = conversation({"role": "user", "content": [result, link]})
    data = DocumentPart("data:application/pdf;base64,AA==")
    assert tool.parts == (ToolResultPart("x", (TextPart("T\nC\n"), data)),)
    assert user.parts == (DocumentPart("http://p"),)


def test_ids_of_calls_are_the_engine_s_again() -> None:
    calls = [{"type": "tool_use", "id": each, "name": "ls", "input": {}} for each in ("toolu_ab", "their-own")]
    results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "x"} for each in calls]
    assistant, first, second = conversation(
        {"role": "assistant", "content": calls}, {"role": "user", "content": results}
    )
    ids = [part.call_id for part in assistant.parts if isinstance(part, ToolCallPart)]
    assert ids == ["call_ab", "their-own"]
    assert [part.call_id for part in (*first.parts, *second.parts) if isinstance(part, ToolResultPart)] == ids


def test_tools_of_anthropic() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "custom", **TOOL, "cache_control": {"type": "ephemeral"}},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    assert [tool.name for tool in decode(tools=tools).tools] == ["bash", "ls"]


def test_a_deferred_tool_is_introduced_where_it_is_found() -> None:
    tools = [{**TOOL, "name": "later", "defer_loading": True}, TOOL]
    found = [{"type": "tool_reference", "tool_name": "later"}, {"type": "tool_reference", "tool_name": "gone"}]
    request = decode(
        tools=tools,
        messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": found}]}],
    )
    assert [tool.name for tool in request.tools] == ["ls"]
    assert request.messages is not None
    [result] = request.messages[0].parts
    assert isinstance(result, ToolResultPart)
    assert result.content == (
        TextPart(
            '{"type": "function", "function": {"name": "later", "description": "List.", '
            '"parameters": {"type": "object"}}}'
        ),
        TextPart("The tool gone is not available."),
    )


def test_tools_that_come_and_go_in_the_conversation() -> None:
    defined = {"type": "tool_definition", "definition": {**TOOL, "name": "new"}}
    [message] = conversation(
        {
            "role": "system",
            "content": [
                {"type": "tool_addition", "tool": defined},
                {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "ls"}},
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "ls"}},
            ],
        },
        tools=[{**TOOL, "defer_loading": True}],
    )
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    assert '"name": "new"' in texts[0] and '"name": "ls"' in texts[1]
    assert texts[2] == "The tool ls is no longer available."


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "`max_tokens` must be an integer."),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000},
            "`thinking.budget_tokens` must be less than `max_tokens`.",
        ),
        ({"tools": [{"name": "ls"}]}, "`tools[0].input_schema` is required."),
        ({"stop_sequences": [""]}, "`stop_sequences` must not contain an empty string."),
    ],
)
def test_refusals_name_the_place(fields: Any, said: str) -> None:
    """`tests/golden/refusals.py` has the others."""
    assert said in refusal(**fields)


def test_what_the_messages_introduce_is_bounded() -> None:
    """A short block stands for a whole definition."""
    tool = {"name": "f", "description": "x" * (MAX_INTRODUCED_CHARS // 2), "input_schema": {}, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "f"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [reference]}
    decode(tools=[tool], messages=[{"role": "user", "content": [result]}])
    refused = refusal(tools=[tool], messages=[{"role": "user", "content": [result, result]}])
    assert str(MAX_INTRODUCED_CHARS) in refused
