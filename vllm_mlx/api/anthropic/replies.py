"""Wire types of replies, and the stop reasons of Messages."""

from typing import Any, Literal

from ...core.events import Finished, FinishReason, Usage
from ..reply import Reply
from ..usage import CacheShortfall, shortfall_of

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

# Reasoning is not signed, since it is not secret; clients expect a signature that is not empty.
SIGNATURE = "vllm-mlx"


class ThinkingTokensDetails(Reply):
    thinking_tokens: int


class MessageUsage(Reply):
    """Prompt tokens are `input_tokens` + `cache_read_input_tokens`. `cache_creation_input_tokens` is 0."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails | None = None
    cache_shortfall: CacheShortfall | None = None

    @classmethod
    def at_start(cls, *, prompt_tokens: int, cached_tokens: int) -> "MessageUsage":
        return cls(
            input_tokens=prompt_tokens - cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached_tokens,
            output_tokens=0,
        )

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        reply = cls.at_start(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        reply.output_tokens = usage.completion_tokens
        reply.output_tokens_details = ThinkingTokensDetails(thinking_tokens=usage.reasoning_tokens)
        if (shortfall := shortfall_of(usage.receipt)) is not None:
            reply.cache_shortfall = shortfall
        return reply


class TextReply(Reply):
    type: Literal["text"] = "text"
    text: str


class ThinkingReply(Reply):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseReply(Reply):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageReply(Reply):
    """`to_json` writes all fields except those of `usage` that were not set: `stop_sequence` may be null."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextReply | ThinkingReply | ToolUseReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage

    def to_json(self) -> str:
        unset = MessageUsage.model_fields.keys() - self.usage.model_fields_set
        return self.model_dump_json(exclude={"usage": unset})


class TokenCount(Reply):
    input_tokens: int


def stop_of(event: Finished) -> tuple[StopReason, str | None]:
    """`stop_reason` and `stop_sequence`. The length limit takes precedence over a stop string, that over a call.

    If the context left fewer tokens than `max_tokens`, the length limit has a reason of its own.
    """
    assert event.reason is not FinishReason.ABORT, "an aborted reply is an error, not an end"
    if event.reason is FinishReason.LENGTH:
        is_clamped = event.usage.clamped_max_tokens is not None
        return ("model_context_window_exceeded" if is_clamped else "max_tokens"), None
    if isinstance(event.stop, str):
        return "stop_sequence", event.stop
    return ("tool_use" if event.reason is FinishReason.TOOL_CALLS else "end_turn"), None
