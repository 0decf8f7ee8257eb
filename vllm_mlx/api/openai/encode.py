"""Events → replies of chat and completions, streamed or complete. A streamed text costs one escape and one join."""

from collections.abc import Sequence
from functools import lru_cache
from json.encoder import encode_basestring as escape  # in C; leaves non-ASCII as it is

from ...core.errors import VLLMMLXError
from ...core.events import (
    Finished,
    FinishReason,
    GenerationEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from ..blocks import ReasoningView
from ..error_replies import OPENAI
from ..replies import FoldedChoice, Reply, ReplyFold, TokenNames, UsageTally
from .decode import ReplySpec
from .replies import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatMessageReply,
    ChatUsage,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobWriter,
    Delta,
    FunctionChunk,
    FunctionReply,
    ToolCallChunk,
    ToolCallReply,
    chat_logprobs,
)

DONE = b"data: [DONE]\n\n"
TEXT = "\ue000text\ue000"  # the mark of the text that a template leaves open


class _Template:
    """An event of a stream as JSON that leaves one text open. To write it costs one escape and one join.

    `event` holds `TEXT` as the value of one field, or of two that get the same text.
    """

    def __init__(self, event: str) -> None:
        head, *between, tail = event.split(f'"{TEXT}"')
        self._head, self._tail = head, tail
        self._between = between[0] if between else None

    def write(self, text: str) -> bytes:
        escaped = escape(text)
        if self._between is None:
            return f"{self._head}{escaped}{self._tail}".encode()
        return f"{self._head}{escaped}{self._between}{escaped}{self._tail}".encode()


class _Stream:
    """What chat and completions share: the chunk around a choice, the usage chunk, the end, and errors."""

    def __init__(self, spec: ReplySpec, chunk: ChatCompletionChunk | Completion) -> None:
        """`chunk` has no choices yet."""
        self._spec = spec
        self._chunk = chunk
        if spec.include_usage:
            chunk.usage = None  # set, so that it is sent
        self._head, _, self._tail = _event(chunk).rpartition("[]")
        self._tally = UsageTally(spec.choices_per_prompt)

    def close(self) -> bytes:
        if not self._spec.include_usage:
            return DONE
        self._chunk.usage = ChatUsage.of(self._tally.total())
        return _event(self._chunk).encode() + DONE

    def fail(self, error: VLLMMLXError) -> bytes:
        """The last event of a stream that failed: `[DONE]` would say that the reply is complete."""
        return _event(OPENAI.error(error).body).encode()

    def _around(self, choice: str) -> str:
        return f"{self._head}[{choice}]{self._tail}"

    def _send(self, choice: ChunkChoice | CompletionChoice) -> bytes:
        return self._around(choice.to_json()).encode()


def _event(reply: Reply) -> str:
    return f"data: {reply.to_json()}\n\n"


def finish_reason(event: Finished) -> str:
    assert event.reason is not FinishReason.ABORT, "an aborted reply is an error, not an end"
    return event.reason.value


def _delta(index: int, delta: Delta) -> str:
    """The choice of a chunk, as JSON."""
    return ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None).to_json()


@lru_cache(1024)
def _opening_choice(index: int) -> str:
    return _delta(index, Delta(role="assistant", content=""))


@lru_cache(1024)
def _text_choice(index: int) -> str:
    return _delta(index, Delta(content=TEXT))


@lru_cache(1024)
def _reasoning_choice(index: int) -> str:
    return _delta(index, Delta(reasoning_content=TEXT, reasoning=TEXT))


@lru_cache(1024)
def _arguments_choice(index: int, call_index: int) -> str:
    chunk = ToolCallChunk(index=call_index, function=FunctionChunk(arguments=TEXT))
    return _delta(index, Delta(tool_calls=[chunk]))


class ChatStream(_Stream):
    """The `StreamEncoder` of chat completions."""

    def __init__(self, spec: ReplySpec, names: TokenNames) -> None:
        super().__init__(
            spec,
            ChatCompletionChunk(
                id=spec.reply_id, object="chat.completion.chunk", created=spec.created, model=spec.model, choices=[]
            ),
        )
        self._names = names
        self._views = [ReasoningView(spec.reasoning) for _ in range(spec.num_choices)]
        self._sees_all = spec.reasoning == "separate"
        self._texts: dict[int, _Template] = {}
        self._reasonings: dict[int, _Template] = {}
        self._arguments: dict[tuple[int, int], _Template] = {}

    def open(self) -> bytes:
        return "".join([self._around(_opening_choice(index)) for index in range(self._spec.num_choices)]).encode()

    def keep_alive(self) -> bytes:
        return self._around(_delta(0, Delta())).encode()

    def feed(self, index: int, event: GenerationEvent) -> bytes:
        if self._sees_all:
            return self._feed(index, event)
        return b"".join(self._feed(index, seen) for seen in self._views[index].feed(event))

    def _feed(self, index: int, event: GenerationEvent) -> bytes:
        match event:
            case TextDelta():
                return self._text(index, event)
            case ReasoningDelta():
                if (template := self._reasonings.get(index)) is None:
                    template = self._reasonings[index] = _Template(self._around(_reasoning_choice(index)))
                return template.write(event.text)
            case ToolCallStart():
                return self._call(index, event)
            case ToolCallDelta():
                return self._call_arguments(index, event.index, event.arguments)
            case ToolCallEnd() if (index, event.index) not in self._arguments:  # the call had none so far
                return self._call_arguments(index, event.index, "{}")
            case Finished():
                return self._end(index, event)
            case _:
                return b""

    def _text(self, index: int, event: TextDelta) -> bytes:
        if event.logprobs and self._spec.logprobs:
            return self._send(
                ChunkChoice(
                    index=index,
                    delta=Delta(content=event.text),
                    logprobs=chat_logprobs(event.logprobs, self._names),
                    finish_reason=None,
                )
            )
        if not event.text:
            return b""
        if (template := self._texts.get(index)) is None:
            template = self._texts[index] = _Template(self._around(_text_choice(index)))
        return template.write(event.text)

    def _call(self, index: int, call: ToolCallStart) -> bytes:
        function = FunctionChunk(name=call.name, arguments="")
        chunk = ToolCallChunk(index=call.index, id=call.call_id, type="function", function=function)
        return self._around(_delta(index, Delta(tool_calls=[chunk]))).encode()

    def _call_arguments(self, index: int, call_index: int, text: str) -> bytes:
        place = index, call_index
        if (template := self._arguments.get(place)) is None:
            template = self._arguments[place] = _Template(self._around(_arguments_choice(*place)))
        return template.write(text)

    def _end(self, index: int, event: Finished) -> bytes:
        self._tally.add(index, event.usage)
        reason = finish_reason(event)
        return self._send(
            ChunkChoice(index=index, delta=Delta(), logprobs=None, finish_reason=reason, stop_reason=event.stop)
        )


class CompletionStream(_Stream):
    """The `StreamEncoder` of completions."""

    def __init__(self, spec: ReplySpec, names: TokenNames) -> None:
        super().__init__(
            spec,
            Completion(id=spec.reply_id, object="text_completion", created=spec.created, model=spec.model, choices=[]),
        )
        self._logprobs = [CompletionLogprobWriter(names) for _ in range(spec.num_choices)]
        self._templates: dict[int, _Template] = {}

    def open(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return self._send(CompletionChoice(index=0, text="", logprobs=None, finish_reason=None))

    def feed(self, index: int, event: GenerationEvent) -> bytes:
        match event:
            case TextDelta(text, logprobs) if logprobs and self._spec.logprobs:
                written = self._logprobs[index].write(logprobs)
                return self._send(CompletionChoice(index=index, text=text, logprobs=written, finish_reason=None))
            case TextDelta() | ReasoningDelta():
                return self._text(index, event.text) if event.text else b""
            case Finished():
                self._tally.add(index, event.usage)
                reason = finish_reason(event)
                return self._send(
                    CompletionChoice(index=index, text="", logprobs=None, finish_reason=reason, stop_reason=event.stop)
                )
            case _:
                return b""

    def _text(self, index: int, text: str) -> bytes:
        if (template := self._templates.get(index)) is None:
            choice = CompletionChoice(index=index, text=TEXT, logprobs=None, finish_reason=None)
            template = self._templates[index] = _Template(self._around(choice.to_json()))
        return template.write(text)


def chat_fold(spec: ReplySpec, names: TokenNames) -> ReplyFold:
    def write(choices: Sequence[FoldedChoice]) -> ChatCompletion:
        return ChatCompletion(
            id=spec.reply_id,
            object="chat.completion",
            created=spec.created,
            model=spec.model,
            choices=[_chat_choice(index, choice, spec, names) for index, choice in enumerate(choices)],
            usage=_usage(choices, spec),
        )

    return ReplyFold(write, num_choices=spec.num_choices, reasoning=spec.reasoning)


def completion_fold(spec: ReplySpec, names: TokenNames) -> ReplyFold:
    def write(choices: Sequence[FoldedChoice]) -> Completion:
        return Completion(
            id=spec.reply_id,
            object="text_completion",
            created=spec.created,
            model=spec.model,
            choices=[_completion_choice(index, choice, spec, names) for index, choice in enumerate(choices)],
            usage=_usage(choices, spec),
        )

    return ReplyFold(write, num_choices=spec.num_choices)


def _usage(choices: Sequence[FoldedChoice], spec: ReplySpec) -> ChatUsage:
    tally = UsageTally(spec.choices_per_prompt)
    for index, choice in enumerate(choices):
        tally.add(index, choice.finished.usage)
    return ChatUsage.of(tally.total())


def _chat_choice(index: int, choice: FoldedChoice, spec: ReplySpec, names: TokenNames) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=_message(choice),
        logprobs=chat_logprobs(choice.logprobs, names) if spec.logprobs else None,
        finish_reason=finish_reason(choice.finished),
        stop_reason=choice.finished.stop,
    )


def _message(choice: FoldedChoice) -> ChatMessageReply:
    text, reasoning = choice.text("text"), choice.text("reasoning") or None
    message = ChatMessageReply(
        role="assistant",
        content=None if choice.calls and not text else text,
        reasoning_content=reasoning,
        reasoning=reasoning,
    )
    if choice.calls:
        message.tool_calls = [_call(call, arguments) for call, arguments in choice.calls]
    return message


def _call(call: ToolCallStart, arguments: str) -> ToolCallReply:
    function = FunctionReply(name=call.name, arguments=arguments)
    return ToolCallReply(id=call.call_id, type="function", function=function)


def _completion_choice(index: int, choice: FoldedChoice, spec: ReplySpec, names: TokenNames) -> CompletionChoice:
    """A completion has one text: what the engine recognised as reasoning belongs to it."""
    return CompletionChoice(
        index=index,
        text=choice.text("text", "reasoning"),
        logprobs=CompletionLogprobWriter(names).write(choice.logprobs) if spec.logprobs else None,
        finish_reason=finish_reason(choice.finished),
        stop_reason=choice.finished.stop,
    )
