"""A conversation that began on another server is taken: blocks of its tools are left out and named, texts are kept."""

from typing import Any

import pytest

from vllm_mlx.api.anthropic.schema import CountTokensBody, MessagesBody
from vllm_mlx.api.wire import UnknownFields
from vllm_mlx.core.messages import Message, TextPart, ToolCallPart, ToolResultPart

from .bodies import HI, body, conversation, refusal

TEXT: Any = {"type": "text", "text": "a"}
PAGE: Any = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "page"}}
PDF: Any = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}


def result(kind: str, content: Any) -> Any:
    return {"type": kind, "tool_use_id": "s1", "content": content, "cache_control": {"type": "ephemeral"}}


# Each block of an assistant, and the text in it.
BLOCKS: Any = [
    *(
        ({"type": "server_tool_use", "id": "s1", "name": name, "input": {"text": "x"}}, "")
        for name in ("web_fetch", "code_execution", "bash_code_execution", "tool_search_tool_regex", "advisor", "new")
    ),
    ({"type": "server_tool_use", "id": "s1"}, ""),
    (result("web_fetch_tool_result", {"type": "web_fetch_result", "url": "http://u", "content": PAGE}), "T\npage"),
    (result("web_fetch_tool_result", {"type": "web_fetch_result", "url": "http://u", "content": PDF}), ""),
    (result("web_fetch_tool_result", {"type": "web_fetch_tool_result_error", "error_code": "url_too_long"}), ""),
    (result("tool_search_tool_result", {"type": "found", "tool_references": [{"type": "tool_reference"}]}), ""),
    (
        result("bash_code_execution_tool_result", {"stdout": "out", "stderr": "", "content": [{"file_id": "f"}]}),
        "out",
    ),
    (result("code_execution_tool_result", {"encrypted_stdout": "x", "stderr": "bad", "return_code": 1}), "bad"),
    (result("text_editor_code_execution_tool_result", {"lines": ["-a", "+b"], "old_start": 1}), "-a\n+b"),
    (result("advisor_tool_result", {"type": "advisor_result", "text": "Try."}), "Try."),
    ({"type": "mcp_tool_use", "id": "m1", "name": "f", "server_name": "s", "input": {}}, ""),
    (result("mcp_tool_result", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]), "one\ntwo"),
    (result("mcp_tool_result", "whole"), "whole"),
    ({"type": "compaction", "content": "So far.", "encrypted_content": "x"}, "So far."),
    ({"type": "compaction", "content": None}, ""),
    ({"type": "container_upload", "file_id": "f"}, ""),
    ({"type": "of_tomorrow", "deep": [[{"text": "no"}], {"more": {"text": "kept"}}], "id": "x"}, "kept"),
    (PAGE, "T\npage"),
    ({"type": "image", "source": {"type": "file", "file_id": "x"}}, ""),
]


def left_out(form: type[CountTokensBody], **fields: Any) -> tuple[str, ...]:
    unknown = UnknownFields()
    form.model_validate(body(fields), context=unknown)
    return unknown.patterns


@pytest.mark.parametrize(("block", "text"), BLOCKS)
def test_a_block_of_an_assistant(block: Any, text: str) -> None:
    messages = [*HI, {"role": "assistant", "content": [TEXT, block, TEXT]}, *HI]
    kept = [TextPart(f"\n{text}\n")] if text else []
    assert conversation(*messages)[1] == Message("assistant", (TextPart("a"), *kept, TextPart("a")))
    for form in (MessagesBody, CountTokensBody):
        assert left_out(form, messages=messages) == (f"messages[].content[].{block['type']}",)


@pytest.mark.parametrize(("block", "text"), BLOCKS[1:-2])
def test_a_block_in_a_turn_of_the_user(block: Any, text: str) -> None:
    """Servers that run tools write their results where the user's are, too."""
    kept = [TextPart(f"\n{text}\n")] if text else []
    if block["type"] != "of_tomorrow":
        assert conversation({"role": "user", "content": [block]}) == (Message("user", tuple(kept)),)
    inside = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, block]}
    [message] = conversation({"role": "user", "content": [inside]})
    assert message.parts == (ToolResultPart("t", (TextPart("a"), *kept)),)
    assert left_out(MessagesBody, messages=[{"role": "user", "content": [inside]}]) == (
        f"messages[].content[].content[].{block['type']}",
    )


def test_what_this_server_understands_is_no_other_block() -> None:
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}}
    page = {"type": "web_search_result", "url": "http://u", "title": "T"}
    blocks = [search, {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [page]}, TEXT]
    call, found, answer = conversation({"role": "assistant", "content": blocks})
    assert isinstance(call.parts[0], ToolCallPart) and isinstance(found.parts[0], ToolResultPart)
    assert answer.parts == (TextPart("a"),)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "image_url", "url": "x"}, "`messages[0].content[0].type` 'image_url' is not supported."),
        ({"text": "x"}, "`messages[0].content[0].type` is required."),
        ({"type": "text"}, "`messages[0].content[0].text` is required."),
        ({"type": "tool_result", "content": "x"}, "`messages[0].content[0].tool_use_id` is required."),
    ],
)
def test_what_a_user_misspells_is_refused(block: Any, said: str) -> None:
    assert said in refusal(messages=[{"role": "user", "content": [block]}])


def test_a_known_block_of_an_assistant_with_a_fault_is_refused() -> None:
    for block, said in (({"type": "text"}, "text` is required."), ({"id": "x"}, "type` is required.")):
        assert said in refusal(messages=[{"role": "assistant", "content": [block]}])
