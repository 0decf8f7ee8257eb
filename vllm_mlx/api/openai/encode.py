"""Events → replies of chat and completions, streamed or complete. A streamed text costs one escape and one join."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from json.encoder import encode_basestring as escape  # in C; leaves non-ASCII as it is
from typing import Any

from pydantic_core import to_json

from ...core.errors import VLLMMLXError
from ...core.events import (
    Counted,
    Finished,
    FinishReason,
    GenerationEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from ..blocks import ReasoningView
from ..error_replies import OPENAI
from ..replies import FoldedChoice, Reply, ReplyFold, TokenNames, finish_details, given, total_usage
from ..text import custom_input
from . import replies
from .decode import ReplySpec

DONE = b"data: [DONE]\n\n"
TEXT = "\ue000text\ue000"  # the mark of a text in the template of an event: to write one costs an escape and a join


class _Stream(ABC):
    """Parts of chat and completions: the chunk around a choice, the usage chunk, the end, and errors."""

    def __init__(self, spec: ReplySpec, kind: str) -> None:
        self._spec = spec
        self._chunk = {"id": spec.reply_id, "object": kind, "created": spec.created, "model": spec.model, "choices": []}
        if spec.include_usage:
            self._chunk["usage"] = None
        self._head, _, self._tail = _event(self._chunk).rpartition("[]")
        self._usages: dict[int, Usage] = {}
        self._templates: dict[Hashable, list[str]] = {}  # by the place of a text: the event around it

    def feed(self, index: int, event: GenerationEvent) -> bytes:
        match event:
            case Started():
                self._usages[index] = Usage(prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens)
            case Counted() | Finished():
                self._usages[index] = event.usage
        return self._with_usage(index, self._feed(index, event))

    @abstractmethod
    def _feed(self, index: int, event: GenerationEvent) -> bytes: ...

    def _with_usage(self, index: int, chunks: bytes) -> bytes:
        """Write the usage of a choice so far into its chunks, which end with null, if the client asked for that."""
        if not self._spec.continuous_usage or not chunks or index not in self._usages:
            return chunks
        usage = replies.ChatUsage.of(self._usages[index]).to_json().encode()
        return chunks.replace(b'"usage":null}\n\n', b'"usage":%b}\n\n' % usage)  # texts have no raw line ends

    def close(self) -> bytes:
        if not self._spec.include_usage:
            return DONE
        usage = _usage(self._usages, self._spec).model_dump(exclude_unset=True)
        return _event({**self._chunk, "usage": usage}).encode() + DONE

    def fail(self, error: VLLMMLXError) -> bytes:
        """Return the last events of a failed stream. `[DONE]` follows the error, because some clients wait for it."""
        return _event(OPENAI.error(error).body).encode() + DONE

    def _around(self, choice: Mapping[str, Any]) -> str:
        return f"{self._head}[{to_json(choice).decode()}]{self._tail}"

    def _send(self, choice: Mapping[str, Any]) -> bytes:
        return self._around(choice).encode()

    def _prepare(self, place: Hashable, choice: Mapping[str, Any]) -> None:
        """Keep the template of a place: a choice that has TEXT for its text."""
        self._templates[place] = self._around(choice).split(f'"{TEXT}"')

    def _write(self, place: Hashable, text: str) -> bytes:
        """Send the choice of this place with this text."""
        return escape(text).join(self._templates[place]).encode()


def _event(data: Any) -> str:
    return f"data: {to_json(data).decode()}\n\n"


def _delta(index: int, logprobs: replies.ChatLogprobs | None = None, **delta: Any) -> dict[str, Any]:
    """Return the choice of a chunk that adds `delta` to the message."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _end(event: Finished) -> dict[str, Any]:
    """Return the fields of a choice that say how it ended."""
    assert event.reason is not FinishReason.ABORT, "an aborted reply is an error, not an end"
    return {"finish_reason": event.reason.value, "stop_reason": event.stop, **finish_details(event)}


class ChatStream(_Stream):
    """The `StreamEncoder` of chat completions."""

    def __init__(self, spec: ReplySpec, names: TokenNames, *, prompt_tokens: int = 0) -> None:
        super().__init__(spec, "chat.completion.chunk")
        self._usages = {index: Usage(prompt_tokens=prompt_tokens) for index in range(spec.num_choices)}
        self._names = names
        self._views = [ReasoningView(spec.reasoning) for _ in range(spec.num_choices)]
        self._sees_all = spec.reasoning == "separate"
        self._custom: dict[tuple[int, int], list[str]] = {}  # arguments of open calls of custom tools

    def open(self) -> bytes:
        begun = {index: self._send(_delta(index, role="assistant", content="")) for index in self._usages}
        return b"".join(self._with_usage(index, chunk) for index, chunk in begun.items())

    def keep_alive(self) -> bytes:
        return self._with_usage(0, self._send(_delta(0)))

    def _feed(self, index: int, event: GenerationEvent) -> bytes:
        if self._sees_all:
            return self._write_event(index, event)
        return b"".join(self._write_event(index, seen) for seen in self._views[index].feed(event))

    def _write_event(self, index: int, event: GenerationEvent) -> bytes:
        match event:
            case TextDelta():
                return self._text(index, event)
            case ReasoningDelta():
                if (place := ("reasoning", index)) not in self._templates:
                    self._prepare(place, _delta(index, reasoning_content=TEXT, reasoning=TEXT))
                return self._write(place, event.text)
            case ToolCallStart(number, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": number, "id": call_id, "type": "function", "function": function}
                if name in self._spec.custom_tools:
                    self._custom[index, number] = []
                return self._send(_delta(index, tool_calls=[call]))
            case ToolCallDelta(number) if (index, number) in self._custom:
                self._custom[index, number].append(event.arguments)  # the text is known when they are complete
                return b""
            case ToolCallEnd(number) if (index, number) in self._custom:
                return self._custom_text(index, number)
            case ToolCallDelta():
                return self._call_arguments(index, event.index, event.arguments)
            case ToolCallEnd(number) if ("call", index, number) not in self._templates:  # without arguments so far
                return self._call_arguments(index, number, "{}")
            case Finished():
                cut_off = [self._custom_text(*place) for place in list(self._custom) if place[0] == index]
                return b"".join(cut_off) + self._send({**_delta(index), **_end(event)})
            case _:
                return b""

    def _custom_text(self, index: int, number: int) -> bytes:
        arguments = "".join(self._custom.pop((index, number)))
        return self._call_arguments(index, number, custom_input(arguments or "{}"))

    def _text(self, index: int, event: TextDelta) -> bytes:
        if event.logprobs and self._spec.logprobs:
            logprobs = replies.ChatLogprobs.of(event.logprobs, self._names)
            return self._send(_delta(index, logprobs, content=event.text))
        if index not in self._templates:
            self._prepare(index, _delta(index, content=TEXT))
        return self._write(index, event.text) if event.text else b""

    def _call_arguments(self, index: int, number: int, text: str) -> bytes:
        if (place := ("call", index, number)) not in self._templates:
            self._prepare(place, _delta(index, tool_calls=[{"index": number, "function": {"arguments": TEXT}}]))
        return self._write(place, text)


class CompletionStream(_Stream):
    """The `StreamEncoder` of completions."""

    def __init__(self, spec: ReplySpec, names: TokenNames) -> None:
        super().__init__(spec, "text_completion")
        self._names = names
        self._num_chars = [0] * spec.num_choices  # written with log-probabilities, which give offsets

    def open(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return self._with_usage(0, self._send(_text_choice(0, "")))

    def _feed(self, index: int, event: GenerationEvent) -> bytes:
        match event:
            case TextDelta() if event.logprobs and self._spec.logprobs:
                logprobs = replies.CompletionLogprobs.of(event.logprobs, self._names, self._num_chars[index])
                self._num_chars[index] += sum(map(len, logprobs.tokens))
                return self._send(_text_choice(index, event.text, logprobs))
            case TextDelta() | ReasoningDelta():
                if index not in self._templates:
                    self._prepare(index, _text_choice(index, TEXT))
                return self._write(index, event.text) if event.text else b""
            case Finished():
                return self._send({**_text_choice(index, ""), **_end(event)})
            case _:
                return b""


def _text_choice(index: int, text: str, logprobs: replies.CompletionLogprobs | None = None) -> dict[str, Any]:
    """Return the choice of a chunk that adds `text` to a completion."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


def chat_fold(spec: ReplySpec, names: TokenNames) -> ReplyFold:
    return _fold(replies.ChatCompletion, _chat_choice, spec, names)


def completion_fold(spec: ReplySpec, names: TokenNames) -> ReplyFold:
    return _fold(replies.Completion, _completion_choice, spec, names)


def _fold(
    reply: Callable[..., Reply],
    choice_of: Callable[[int, FoldedChoice, ReplySpec, TokenNames], Reply],
    spec: ReplySpec,
    names: TokenNames,
) -> ReplyFold:
    def write(choices: Sequence[FoldedChoice]) -> Reply:
        return reply(
            id=spec.reply_id,
            created=spec.created,
            model=spec.model,
            choices=[choice_of(index, choice, spec, names) for index, choice in enumerate(choices)],
            usage=_usage({index: choice.finished.usage for index, choice in enumerate(choices)}, spec),
        )

    return ReplyFold(write, num_choices=spec.num_choices, reasoning=spec.reasoning)


def _usage(usages: Mapping[int, Usage], spec: ReplySpec) -> replies.ChatUsage:
    return replies.ChatUsage.of(total_usage(usages, spec.choices_per_prompt))


def _chat_choice(index: int, choice: FoldedChoice, spec: ReplySpec, names: TokenNames) -> replies.ChatChoice:
    text, reasoning = choice.text("text"), choice.text("reasoning") or None
    calls = [
        replies.ToolCallReply(id=call.call_id, function=replies.FunctionReply(name=call.name, arguments=written))
        for call, arguments in choice.calls
        for written in [custom_input(arguments or "{}") if call.name in spec.custom_tools else arguments]
    ]
    message = replies.ChatMessageReply(
        content=None if calls and not text else text,
        refusal=None,
        reasoning_content=reasoning,
        reasoning=reasoning,
        **given(tool_calls=calls or None),
    )
    logprobs = replies.ChatLogprobs.of(choice.logprobs, names) if spec.logprobs else None
    return replies.ChatChoice(index=index, message=message, logprobs=logprobs, **_end(choice.finished))


def _completion_choice(
    index: int, choice: FoldedChoice, spec: ReplySpec, names: TokenNames
) -> replies.CompletionChoice:
    """Return a choice with one text, which includes recognised reasoning."""
    logprobs = replies.CompletionLogprobs.of(choice.logprobs, names) if spec.logprobs else None
    text = choice.text("text", "reasoning")
    return replies.CompletionChoice(index=index, text=text, logprobs=logprobs, **_end(choice.finished))
