"""A client and a model that talk through a RequestProcessor, without an engine: what each of them sends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.events import FinishReason
from vllm_mlx.core.messages import Message, Part, ReasoningPart, TextPart, ToolCallPart, ToolResultPart, ToolSpec
from vllm_mlx.core.request import Request
from vllm_mlx.core.step import TokenOutput
from vllm_mlx.disk.kept import NO_MEMORIES, Memories
from vllm_mlx.formats.reply import FinishedReply
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.processor import PreparedRequest, RequestProcessor
from vllm_mlx.prompt.reply_formats import reply_formats

TOOLS = (
    ToolSpec("read", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),
    ToolSpec(
        "edit",
        "Edits a file.",
        {
            "type": "object",
            "properties": {
                "all": {"type": "boolean", "default": False},
                "path": {"type": "string"},
                "text": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "number"}},
            },
        },
    ),
)
Echo = Callable[[Message], Message]
Encode = Callable[[Tokenizer, str], list[int]]


@dataclass(frozen=True)
class Turn:
    prepared: PreparedRequest
    reply: FinishedReply

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.prepared.prompt.token_ids, *self.reply.token_ids)


def make_processor(
    tokenizer: Tokenizer,
    *,
    reasoning: str = "qwen3",
    tools: str = "hermes",
    memories: Memories = NO_MEMORIES,
    resumes_anywhere: bool = False,
    **config: Any,
) -> RequestProcessor:
    settings = EngineConfig(model="m", reasoning_parser=reasoning, tool_call_parser=tools, **config)
    return RequestProcessor(
        tokenizer,
        settings,
        Path("/nowhere"),
        formats=reply_formats(settings, tokenizer),
        max_model_len=1 << 20,
        vocab_size=tokenizer.vocab_size,
        memories=memories,
        resumes_anywhere=resumes_anywhere,
    )


def canonical(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def letter_by_letter(tokenizer: Tokenizer, text: str) -> list[int]:
    """As a model may write, and no tokenizer does: special tokens whole, everything else a character at a time."""
    special = [token_id for token_id in canonical(tokenizer, text) if tokenizer.added_token(token_id) is not None]
    ids: list[int] = []
    for token_id in special:
        added = tokenizer.added_token(token_id)
        assert added is not None
        before, text = text.split(added[0], 1)
        ids += [part for char in before for part in canonical(tokenizer, char)] + [token_id]
    return ids + [part for char in text for part in canonical(tokenizer, char)]


class Session:
    """One client's conversation. `echo`: how it sends replies back; `encode`: with which ids the model writes."""

    def __init__(
        self,
        processor: RequestProcessor,
        *,
        echo: Echo = lambda message: message,
        encode: Encode = letter_by_letter,
        messages: Sequence[Message] = (),
        **options: Any,
    ):
        self.processor = processor
        self.messages = list(messages)
        self.turns: list[Turn] = []
        self.echo = echo
        self.encode = encode
        self._options = {"tools": TOOLS, **options}

    def request(self) -> Request:
        return Request(request_id="r", messages=tuple(self.messages), **self._options)

    def prepare(self) -> PreparedRequest:
        return self.processor.prepare(self.request())

    def answer(self, text: str, reason: FinishReason = FinishReason.STOP) -> Turn:
        """The model replies with `text`, its end token included; the client takes the reply into its conversation."""
        prepared = self.prepare()
        turn = Turn(prepared, generate(self.processor, prepared, self.encode(self.processor.tokenizer, text), reason))
        self.processor.remember(prepared, turn.reply)
        self.turns.append(turn)
        self.messages.append(self.echo(turn.reply.message))
        return turn

    def ask(self, text: str) -> None:
        self.messages.append(user(text))

    def give_results(self, *texts: str) -> None:
        for call, text in zip(self.turns[-1].reply.calls, texts, strict=True):
            self.messages.append(Message("tool", (ToolResultPart(call.call_id, (TextPart(text),), call.name),)))


def generate(
    processor: RequestProcessor, prepared: PreparedRequest, token_ids: Sequence[int], reason: FinishReason
) -> FinishedReply:
    output = processor.output(prepared)
    for token_id in token_ids:
        output.feed([TokenOutput(0, token_id)])
        if output.stopped:
            break
    output.finish(reason, token_ids[-1] if reason is FinishReason.STOP else None)
    return output.reply


def user(text: str) -> Message:
    return Message("user", (TextPart(text),))


def system(text: str) -> Message:
    return Message("system", (TextPart(text),))


# How clients send a reply back


def each_part(change: Callable[[Part], Part | None]) -> Echo:
    return lambda message: replace(
        message, parts=tuple(part for old in message.parts if (part := change(old)) is not None)
    )


def _with_defaults(part: Part) -> Part:
    """Schema order, and the declared defaults that the model left out."""
    if not isinstance(part, ToolCallPart):
        return part
    defaults = {"all": False} if part.name == "edit" else {}
    return replace(part, arguments={**defaults, **dict(sorted(part.arguments.items()))})


def _reordered(part: Part) -> Part:
    if not isinstance(part, ToolCallPart):
        return part
    return replace(part, arguments=dict(reversed(part.arguments.items())), call_id=part.call_id + "x")


def _whole_numbers(value: Any) -> Any:
    """JSON as a program writes it that has one kind of number."""
    match value:
        case dict():
            return {key: _whole_numbers(item) for key, item in value.items()}
        case list():
            return [_whole_numbers(item) for item in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


ECHOES: dict[str, Echo] = {
    "verbatim": lambda message: message,
    "reasoning dropped": each_part(lambda part: None if isinstance(part, ReasoningPart) else part),
    "reasoning trimmed": each_part(
        lambda part: ReasoningPart(part.text.rstrip("\n")) if isinstance(part, ReasoningPart) else part
    ),
    "text trimmed": each_part(lambda part: TextPart(part.text.strip()) if isinstance(part, TextPart) else part),
    "arguments with defaults": each_part(_with_defaults),
    "arguments in another order, other ids": each_part(_reordered),
    "numbers rewritten": each_part(
        lambda part: replace(part, arguments=_whole_numbers(part.arguments)) if isinstance(part, ToolCallPart) else part
    ),
}
