"""Encoding alone: what a streamed event costs in each protocol, beside the same bytes written by hand."""

import contextlib
import time
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring as escape
from pathlib import Path

from vllm_mlx.api.anthropic.decode import MessageSpec
from vllm_mlx.api.anthropic.encode import MessageStream
from vllm_mlx.api.openai.decode import ReplySpec
from vllm_mlx.api.openai.encode import ChatStream, CompletionStream
from vllm_mlx.api.replies import StreamEncoder
from vllm_mlx.api.responses.encode import ResponseStream
from vllm_mlx.api.responses.replies import ResponseSpec
from vllm_mlx.core.events import GenerationEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart

from .figures import OURS, Aim, Figure

NUM_EVENTS = 50_000
BY_HAND = "by hand"  # one escape and one join, nothing else
_TEXT = " hello"
_CALL = ToolCallStart(0, "call_0123456789abcdef", "read_file")
_MOST = {"chat": 4.0, "completions": 4.0, "messages": 20.0, "responses": 20.0}  # times the cost by hand


class _NoNames:
    def token_text(self, token_id: int) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""


def _streams() -> dict[str, StreamEncoder]:
    chat = ReplySpec(reply_id="chatcmpl-" + 32 * "0", model="tiny", created=1_234_567_890, stream=True)
    return {
        "chat": ChatStream(chat, _NoNames()),
        "completions": CompletionStream(chat, _NoNames()),
        "messages": MessageStream(MessageSpec(reply_id="msg_" + 32 * "0", model="tiny"), prompt_tokens=1),
        "responses": ResponseStream(ResponseSpec(reply_id="resp_" + 32 * "0", model="tiny", created_at=1_234_567_890)),
    }


def _measure(stream: StreamEncoder, event: GenerationEvent) -> Callable[[], float]:
    """The cost of one event in µs."""

    def measure() -> float:
        feed = stream.feed
        feed(0, event)
        start = time.perf_counter()
        for _ in range(NUM_EVENTS):
            feed(0, event)
        return (time.perf_counter() - start) / NUM_EVENTS * 1e6

    return measure


def _by_hand(sample: bytes) -> Callable[[], float]:
    head, *_, tail = sample.decode().split(escape(_TEXT))

    def write(text: str) -> bytes:
        return f"{head}{escape(text)}{tail}".encode()

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(NUM_EVENTS):
            write(_TEXT)
        return (time.perf_counter() - start) / NUM_EVENTS * 1e6

    return measure


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    """The figures. No checkpoint is read."""
    events: dict[str, GenerationEvent] = {
        "text": TextDelta(_TEXT),
        "reasoning": ReasoningDelta(_TEXT),
        "arguments": ToolCallDelta(0, _TEXT),
    }
    figures = []
    for kind, event in events.items():
        for protocol, stream in _streams().items():
            if protocol == "completions" and kind == "arguments":
                continue
            if kind == "arguments":
                stream.feed(0, _CALL)
            stream.feed(0, event)
            measures = {OURS: _measure(stream, event), BY_HAND: _by_hand(stream.feed(0, event))}
            aim = Aim(bound=_MOST[protocol], at_least=False, against=BY_HAND)
            figures.append(Figure(name=f"{protocol}: {kind}", unit="µs/event", measures=measures, aims=(aim,)))
    yield figures
