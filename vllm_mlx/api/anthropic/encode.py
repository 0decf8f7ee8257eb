"""Events → one message, streamed or complete. A streamed text costs one escape and one join."""

from collections.abc import Sequence
from json.encoder import encode_basestring as escape  # in C; leaves non-ASCII as it is
from typing import Any, Literal

from pydantic_core import to_json

from ...core.errors import VLLMMLXError
from ...core.events import Finished, FinishReason, GenerationEvent, SearchDone, SearchError, Started, Usage
from ..blocks import BlockDelta, BlockEnd, BlockEvent, BlockSplitter, BlockStart, Kind
from ..error_replies import ANTHROPIC, may_repeat
from ..replies import CacheShortfall, FinishDetails, FoldedChoice, Reply, ReplyFold, finish_details, given, shortfall_of
from ..search import SEARCH_NAME
from ..text import decode_arguments, seal
from .decode import MessageSpec, encode_call_id

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

# Reasoning is not signed, since it is not secret; clients expect a signature that is not empty.
SIGNATURE = "vllm-mlx"


class ThinkingTokensDetails(Reply):
    thinking_tokens: int


class ServerToolUsage(Reply):
    web_search_requests: int


class MessageUsage(Reply):
    """Prompt tokens are `input_tokens` + `cache_read_input_tokens`. `cache_creation_input_tokens` is 0."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails | None = None
    server_tool_use: ServerToolUsage | None = None
    cache_shortfall: CacheShortfall | None = None

    @classmethod
    def of(cls, usage: Usage, *, at_end: bool = True) -> "MessageUsage":
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            **given(
                output_tokens_details=ThinkingTokensDetails(thinking_tokens=usage.reasoning_tokens) if at_end else None,
                server_tool_use=ServerToolUsage(web_search_requests=usage.num_searches) if usage.num_searches else None,
                cache_shortfall=shortfall_of(usage.receipt),
            ),
        )


class TextReply(Reply):
    type: Literal["text"] = "text"
    text: str


class ThinkingReply(Reply):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseReply(Reply):
    type: Literal["tool_use", "server_tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class WebSearchResultReply(Reply):
    """A page that was found. `encrypted_content` holds the text for the next turn. It is packed, not encrypted."""

    type: Literal["web_search_result"] = "web_search_result"
    url: str
    title: str
    encrypted_content: str
    page_age: str | None


class WebSearchErrorReply(Reply):
    type: Literal["web_search_tool_result_error"] = "web_search_tool_result_error"
    error_code: SearchError


class WebSearchToolResultReply(Reply):
    type: Literal["web_search_tool_result"] = "web_search_tool_result"
    tool_use_id: str
    content: list[WebSearchResultReply] | WebSearchErrorReply


ContentReply = TextReply | ThinkingReply | ToolUseReply | WebSearchToolResultReply


class MessageReply(Reply):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    finish_details: FinishDetails | None = None
    usage: MessageUsage


class TokenCount(Reply):
    input_tokens: int


def stop_of(event: Finished) -> dict[str, Any]:
    """Return the fields of the end. The length limit takes precedence over a stop string, the stop string over a call.

    If the context left fewer tokens than `max_tokens`, the length limit has a separate reason.
    """
    assert event.reason is not FinishReason.ABORT, "an aborted reply is an error, not an end"
    reason: StopReason = "tool_use" if event.reason is FinishReason.TOOL_CALLS else "end_turn"
    sequence = None
    if event.reason is FinishReason.LENGTH:
        is_clamped = event.usage.clamped_max_tokens is not None
        reason = "model_context_window_exceeded" if is_clamped else "max_tokens"
    elif isinstance(event.stop, str):
        reason, sequence = "stop_sequence", event.stop
    return {"stop_reason": reason, "stop_sequence": sequence, **finish_details(event, encode_call_id)}


_DELTAS: dict[Kind, str] = {
    "text": '"delta":{"type":"text_delta","text":',
    "reasoning": '"delta":{"type":"thinking_delta","thinking":',
    "call": '"delta":{"type":"input_json_delta","partial_json":',
    "search": "",  # it comes whole
}
_DELTA_HEAD = 'event: content_block_delta\ndata: {"type":"content_block_delta","index":'


class MessageStream:
    """The `StreamEncoder` of Messages, for one choice.

    `message_start` waits for the event `Started`, which says how much was cached, or for the first keep-alive.
    """

    def __init__(self, spec: MessageSpec, *, prompt_tokens: int) -> None:
        self._spec = spec
        self._prompt_tokens = prompt_tokens
        self._blocks = BlockSplitter(spec.reasoning)
        self._is_started = False
        self._num_blocks = 0
        self._has_ended = False  # whether any block has

    def open(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return self._start(cached_tokens=0) + _event("ping")

    def feed(self, index: int, event: GenerationEvent) -> bytes:
        if isinstance(event, Started):
            return self._start(event.cached_tokens)
        wire = b"".join([self._block(block) for block in self._blocks.feed(event)])
        if isinstance(event, Finished):
            wire += self._end(event)
        # Without a `Started` event, the first output starts the message.
        return wire if self._is_started or not wire else self._start(cached_tokens=0) + wire

    def fail(self, error: VLLMMLXError) -> bytes:
        """End the open block first, so that clients keep it. A call stays open, because clients would run it.

        Claude Code sends a prompt again, without streaming, if the stream failed before any block ended.
        """
        ended = [block for block in self._blocks.close() if isinstance(block, BlockEnd) and block.call is None]
        wire = b""
        if not (ended or self._has_ended or may_repeat(error)):
            wire = self._start(0) + self._block(BlockStart(self._num_blocks, "text"))
            ended = [BlockEnd(self._num_blocks - 1, "text", "")]
        wire += b"".join([self._block(block) for block in ended])
        return wire + f"event: error\ndata: {ANTHROPIC.error(error).body.to_json()}\n\n".encode()

    def close(self) -> bytes:
        return _event("message_stop")

    def _start(self, cached_tokens: int) -> bytes:
        if self._is_started:
            return b""
        self._is_started = True
        usage = MessageUsage.of(Usage(prompt_tokens=self._prompt_tokens, cached_tokens=cached_tokens), at_end=False)
        message = _message(self._spec, [], usage)
        return _event("message_start", f',"message":{message.to_json()}')

    def _end(self, event: Finished) -> bytes:
        delta = to_json(stop_of(event)).decode()
        return _event("message_delta", f',"delta":{delta},"usage":{MessageUsage.of(event.usage).to_json()}')

    def _block(self, event: BlockEvent) -> bytes:
        match event:
            case BlockDelta():
                if event.kind == "reasoning" and self._spec.thinking == "sealed":
                    return b""
                return f"{_DELTA_HEAD}{event.index},{_DELTAS[event.kind]}{escape(event.text)}}}}}\n\n".encode()
            case BlockStart(index):
                self._num_blocks = index + 1
                block = _content(self._spec, event).to_json()
                return _event("content_block_start", f',"index":{index},"content_block":{block}')
            case BlockEnd(index, kind, text):
                self._has_ended = True
                signed = b""
                if kind == "reasoning":
                    delta = f'"delta":{{"type":"signature_delta","signature":"{signature(self._spec, text)}"}}'
                    signed = f"{_DELTA_HEAD}{index},{delta}}}\n\n".encode()
                return signed + _event("content_block_stop", f',"index":{index}')


def _event(name: str, fields: str = "") -> bytes:
    """Return an event with these `fields`: JSON members, each after a comma."""
    return f'event: {name}\ndata: {{"type":"{name}"{fields}}}\n\n'.encode()


def signature(spec: MessageSpec, thinking: str) -> str:
    """Return the signature of a thinking block. Sealed reasoning is in it, and the client sends it back."""
    return seal(thinking) if spec.thinking == "sealed" else SIGNATURE


def message_fold(spec: MessageSpec) -> ReplyFold:
    def write(choices: Sequence[FoldedChoice]) -> MessageReply:
        [choice] = choices
        content = [_content(spec, block) for block in choice.blocks]
        return _message(spec, content, MessageUsage.of(choice.finished.usage), **stop_of(choice.finished))

    return ReplyFold(write, reasoning=spec.reasoning)


def _message(spec: MessageSpec, content: list[ContentReply], usage: MessageUsage, **stop: Any) -> MessageReply:
    stop = {"stop_reason": None, "stop_sequence": None, **stop}
    return MessageReply(id=spec.reply_id, model=spec.model, content=content, usage=usage, **stop)


def _search_result(done: SearchDone) -> WebSearchToolResultReply:
    call_id = encode_call_id(done.call_id, is_search=True)
    if done.error is not None:
        return WebSearchToolResultReply(tool_use_id=call_id, content=WebSearchErrorReply(error_code=done.error))
    pages = [
        WebSearchResultReply(url=page.url, title=page.title, encrypted_content=seal(page.text), page_age=None)
        for page in done.pages
    ]
    return WebSearchToolResultReply(tool_use_id=call_id, content=pages)


def _content(spec: MessageSpec, block: BlockStart | BlockEnd) -> ContentReply:
    """Return the content of a block: empty if the block starts."""
    text = block.text if isinstance(block, BlockEnd) else ""
    if block.search is not None:
        return _search_result(block.search)
    if block.call is not None:
        is_search = spec.search is not None and block.call.name == SEARCH_NAME
        call_id = encode_call_id(block.call.call_id, is_search=is_search)
        kind: Literal["tool_use", "server_tool_use"] = "server_tool_use" if is_search else "tool_use"
        return ToolUseReply(type=kind, id=call_id, name=block.call.name, input=decode_arguments(text))
    if block.kind == "text":
        return TextReply(text=text)
    thinking = "" if spec.thinking == "sealed" else text
    return ThinkingReply(thinking=thinking, signature=signature(spec, text) if isinstance(block, BlockEnd) else "")
