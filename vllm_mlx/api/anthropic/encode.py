"""Events → one message, streamed or complete. A streamed text costs one escape and one join."""

from collections.abc import Sequence
from json.encoder import encode_basestring as escape
from typing import Any, Literal

from ...core.errors import VLLMMLXError
from ...core.events import Finished, FinishReason, GenerationEvent, Started, ToolCallStart, Usage
from ..blocks import BlockDelta, BlockEnd, BlockEvent, BlockSplitter, BlockStart, Kind, ReasoningMode
from ..error_replies import ANTHROPIC
from ..replies import CacheShortfall, FoldedChoice, Reply, ReplyFold, shortfall_of
from ..sealed import seal
from ..text import decode_arguments
from .content import encode_call_id
from .decode import MessageSpec

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


PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

_DELTAS: dict[Kind, str] = {
    "text": '"delta":{"type":"text_delta","text":',
    "reasoning": '"delta":{"type":"thinking_delta","thinking":',
    "call": '"delta":{"type":"input_json_delta","partial_json":',
}
_DELTA_HEAD = 'event: content_block_delta\ndata: {"type":"content_block_delta","index":'


class MessageStream:
    """The `StreamEncoder` of Messages, for one choice.

    `message_start` waits for the event `Started`, which says how much was cached, or for the first keep-alive.
    """

    def __init__(self, spec: MessageSpec, *, prompt_tokens: int) -> None:
        self._spec = spec
        self._prompt_tokens = prompt_tokens
        self._blocks = BlockSplitter(_reasoning_mode(spec))
        self._is_started = False

    def open(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return self._start(cached_tokens=0) + PING

    def feed(self, index: int, event: GenerationEvent) -> bytes:
        if isinstance(event, Started):
            return self._start(event.cached_tokens)
        wire = b"".join([self._block(block) for block in self._blocks.feed(event)])
        if isinstance(event, Finished):
            wire += self._end(event)
        # Without a `Started` event, the first output starts the message.
        return wire if self._is_started or not wire else self._start(cached_tokens=0) + wire

    def fail(self, error: VLLMMLXError) -> bytes:
        """End the open block first, so that clients keep what they have received."""
        blocks = b"".join([self._block(block) for block in self._blocks.close()])
        return blocks + f"event: error\ndata: {ANTHROPIC.error(error).body.to_json()}\n\n".encode()

    def close(self) -> bytes:
        return STOP

    def _start(self, cached_tokens: int) -> bytes:
        if self._is_started:
            return b""
        self._is_started = True
        message = MessageReply(
            id=self._spec.reply_id,
            model=self._spec.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessageUsage.at_start(prompt_tokens=self._prompt_tokens, cached_tokens=cached_tokens),
        )
        return f'event: message_start\ndata: {{"type":"message_start","message":{message.to_json()}}}\n\n'.encode()

    def _end(self, event: Finished) -> bytes:
        reason, sequence = stop_of(event)
        matched = "null" if sequence is None else escape(sequence)
        delta = f'{{"stop_reason":"{reason}","stop_sequence":{matched}}}'
        usage = MessageUsage.of(event.usage).to_json()
        return f'event: message_delta\ndata: {{"type":"message_delta","delta":{delta},"usage":{usage}}}\n\n'.encode()

    def _block(self, event: BlockEvent) -> bytes:
        match event:
            case BlockDelta(index, kind, text):
                if kind == "reasoning" and self._spec.thinking == "sealed":
                    return b""
                return f"{_DELTA_HEAD}{index},{_DELTAS[kind]}{escape(text)}}}}}\n\n".encode()
            case BlockStart():
                return self._block_start(event)
            case BlockEnd():
                return self._block_end(event)

    def _block_start(self, event: BlockStart) -> bytes:
        block = _start_of(event).model_dump_json()
        data = f'{{"type":"content_block_start","index":{event.index},"content_block":{block}}}'
        return f"event: content_block_start\ndata: {data}\n\n".encode()

    def _block_end(self, event: BlockEnd) -> bytes:
        signed = ""
        if event.kind == "reasoning":
            delta = f'"delta":{{"type":"signature_delta","signature":"{signature(self._spec, event.text)}"}}'
            signed = f"{_DELTA_HEAD}{event.index},{delta}}}\n\n"
        stop = f'{{"type":"content_block_stop","index":{event.index}}}'
        return f"{signed}event: content_block_stop\ndata: {stop}\n\n".encode()


def signature(spec: MessageSpec, thinking: str) -> str:
    """The signature of a thinking block. Sealed reasoning is in it, and the client sends it back."""
    return seal(thinking) if spec.thinking == "sealed" else SIGNATURE


def message_fold(spec: MessageSpec) -> ReplyFold:
    def write(choices: Sequence[FoldedChoice]) -> MessageReply:
        [choice] = choices
        reason, sequence = stop_of(choice.finished)
        return MessageReply(
            id=spec.reply_id,
            model=spec.model,
            content=[_content(spec, block) for block in choice.blocks],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=MessageUsage.of(choice.finished.usage),
        )

    return ReplyFold(write, reasoning=_reasoning_mode(spec))


def _reasoning_mode(spec: MessageSpec) -> ReasoningMode:
    return "hidden" if spec.thinking == "hidden" else "separate"


def _content(spec: MessageSpec, block: BlockEnd) -> TextReply | ThinkingReply | ToolUseReply:
    if block.call is not None:
        return _tool_use(block.call, decode_arguments(block.text))
    if block.kind == "reasoning":
        thinking = "" if spec.thinking == "sealed" else block.text
        return ThinkingReply(thinking=thinking, signature=signature(spec, block.text))
    return TextReply(text=block.text)


def _start_of(block: BlockStart) -> TextReply | ThinkingReply | ToolUseReply:
    if block.call is not None:
        return _tool_use(block.call, {})
    return ThinkingReply(thinking="", signature="") if block.kind == "reasoning" else TextReply(text="")


def _tool_use(call: ToolCallStart, arguments: dict[str, Any]) -> ToolUseReply:
    return ToolUseReply(id=encode_call_id(call.call_id), name=call.name, input=arguments)
