"""Events of a reply become its message."""

from vllm_mlx.core.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart, ToolCallPart
from vllm_mlx.formats.reply import FinishedReply, ReplyBuilder


def test_parts_stand_in_order_and_arguments_as_written() -> None:
    builder = ReplyBuilder()
    builder.feed([ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("o")])
    builder.feed([TextDelta("k"), ToolCallStart(0, "c0", "f"), ToolCallDelta(0, '{"b": 1,')])
    builder.feed([ToolCallDelta(0, ' "a": 2}'), ToolCallEnd(0), ToolCallStart(1, "c1", "g"), ToolCallEnd(1)])
    message = builder.message()
    assert message == Message(
        "assistant",
        (ReasoningPart("hm"), TextPart("ok"), ToolCallPart("c0", "f", {"b": 1, "a": 2}), ToolCallPart("c1", "g", {})),
    )
    assert list(message.parts[2].arguments) == ["b", "a"]  # type: ignore[union-attr]
    assert builder.is_complete
    reply = FinishedReply(message=message, token_ids=(1,))
    assert reply.has_reasoning and [call.name for call in reply.calls] == ["f", "g"]


def test_a_call_that_cannot_be_read_has_no_arguments() -> None:
    for arguments, is_closed in (('{"a": 1', False), ('{"a": 1}', False), ('{"a": }', True), ("[1]", True)):
        builder = ReplyBuilder()
        builder.feed([ToolCallStart(0, "c0", "f"), ToolCallDelta(0, arguments)])
        builder.feed([ToolCallEnd(0)] if is_closed else [])
        assert builder.message().parts == (ToolCallPart("c0", "f", {}),)
        assert not builder.is_complete


def test_arguments_nested_beyond_all_reason_are_not_compared() -> None:
    for depth, is_complete in ((60, True), (70, False), (900, False)):
        builder = ReplyBuilder()
        arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
        builder.feed([ToolCallStart(0, "c0", "f"), ToolCallDelta(0, arguments), ToolCallEnd(0)])
        assert builder.is_complete is is_complete
