"""Events → replies of chat and completions, streamed or complete. A streamed text costs one escape and one join."""

import json
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring as escape  # in C; leaves non-ASCII as it is

from ...core.errors import VLLMMLXError
from ...core.events import (
    Finished,
    FinishReason,
    GenerationEvent,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from ..blocks import ReasoningView
from ..encoder import FoldedChoice, ReplyFold, TokenNames
from ..error_replies import OPENAI
from ..usage import UsageTally
from .decode import ReplySpec
from .logprobs import CompletionLogprobWriter, chat_logprobs
from .replies import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    FunctionReply,
    MessageReply,
    ToolCallReply,
    UsageReply,
)

DONE = b"data: [DONE]\n\n"


class _Chunks:
    """The constant text around what changes from chunk to chunk."""

    def __init__(self, spec: ReplySpec, kind: str) -> None:
        head = f'data: {{"id":{escape(spec.reply_id)},"object":"{kind}","created":{spec.created},'
        self.head = f'{head}"model":{escape(spec.model)},"choices":['
        self.tail = "]" + (',"usage":null' if spec.include_usage else "") + "}\n\n"

    def choice(self, text: str) -> bytes:
        return f"{self.head}{text}{self.tail}".encode()

    def usage(self, tally: UsageTally) -> bytes:
        return f'{self.head}],"usage":{UsageReply.of(tally.total()).to_json()}}}\n\n'.encode()


class _Stream:
    """What chat and completions share: the usage chunk, the end, and errors."""

    def __init__(self, spec: ReplySpec, kind: str) -> None:
        self._spec = spec
        self._chunks = _Chunks(spec, kind)
        self._tally = UsageTally(spec.choices_per_prompt)

    def close(self) -> bytes:
        return self._chunks.usage(self._tally) + DONE if self._spec.include_usage else DONE

    def fail(self, error: VLLMMLXError) -> bytes:
        """The last event of a stream that failed: `[DONE]` would say that the reply is whole."""
        return f"data: {OPENAI.error(error).body.to_json()}\n\n".encode()

    def _finish(self, index: int, event: Finished) -> str:
        self._tally.add(index, event.usage)
        return f'"finish_reason":"{finish_reason(event)}","stop_reason":{json.dumps(event.stop, ensure_ascii=False)}}}'


def finish_reason(event: Finished) -> str:
    assert event.reason is not FinishReason.ABORT, "an aborted reply is an error, not an end"
    return event.reason.value


class ChatStream(_Stream):
    """`api.encoder.StreamEncoder` of chat completions."""

    def __init__(self, spec: ReplySpec, names: TokenNames) -> None:
        super().__init__(spec, "chat.completion.chunk")
        self._names = names
        self._views = [ReasoningView(spec.reasoning) for _ in range(spec.num_choices)]
        self._is_plain = spec.reasoning == "separate"
        head = self._chunks.head
        self._heads = [f'{head}{{"index":{index},"delta":{{' for index in range(spec.num_choices)]
        self._tail = f'}},"logprobs":null,"finish_reason":null}}{self._chunks.tail}'
        self._calls_with_arguments: set[tuple[int, int]] = set()

    def open(self) -> bytes:
        role = '"role":"assistant","content":""'
        return b"".join(self._delta(index, role) for index in range(self._spec.num_choices))

    def keep_alive(self) -> bytes:
        return self._delta(0, "")

    def feed(self, index: int, event: GenerationEvent) -> bytes:
        if self._is_plain:
            return self._feed(index, event)
        return b"".join(self._feed(index, each) for each in self._views[index].feed(event))

    def _feed(self, index: int, event: GenerationEvent) -> bytes:
        match event:
            case TextDelta(text, logprobs):
                if logprobs and self._spec.logprobs:
                    return self._with_logprobs(index, text, logprobs)
                return self._delta(index, f'"content":{escape(text)}') if text else b""
            case ReasoningDelta(text):
                escaped = escape(text)
                return self._delta(index, f'"reasoning_content":{escaped},"reasoning":{escaped}')
            case ToolCallStart():
                function = f'{{"name":{escape(event.name)},"arguments":""}}'
                call = f'"index":{event.index},"id":{escape(event.call_id)},"type":"function","function":{function}'
                return self._delta(index, f'"tool_calls":[{{{call}}}]')
            case ToolCallDelta(call_index, arguments):
                self._calls_with_arguments.add((index, call_index))
                return self._arguments(index, call_index, arguments)
            case ToolCallEnd(call_index) if (index, call_index) not in self._calls_with_arguments:
                return self._arguments(index, call_index, "{}")
            case Finished():
                return self._chunks.choice(
                    f'{{"index":{index},"delta":{{}},"logprobs":null,{self._finish(index, event)}'
                )
            case _:
                return b""

    def _delta(self, index: int, fields: str) -> bytes:
        return f"{self._heads[index]}{fields}{self._tail}".encode()

    def _arguments(self, index: int, call_index: int, arguments: str) -> bytes:
        call = f'{{"index":{call_index},"function":{{"arguments":{escape(arguments)}}}}}'
        return self._delta(index, f'"tool_calls":[{call}]')

    def _with_logprobs(self, index: int, text: str, tokens: Iterable[TokenLogprob]) -> bytes:
        logprobs = chat_logprobs(tokens, self._names).to_json()
        delta = f'{{"index":{index},"delta":{{"content":{escape(text)}}},"logprobs":{logprobs},"finish_reason":null}}'
        return self._chunks.choice(delta)


class CompletionStream(_Stream):
    """`api.encoder.StreamEncoder` of completions."""

    def __init__(self, spec: ReplySpec, names: TokenNames) -> None:
        super().__init__(spec, "text_completion")
        self._logprobs = [CompletionLogprobWriter(names) for _ in range(spec.num_choices)]

    def open(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return self._text(0, "", "null")

    def feed(self, index: int, event: GenerationEvent) -> bytes:
        match event:
            case TextDelta(text, logprobs):
                if logprobs and self._spec.logprobs:
                    return self._text(index, text, self._logprobs[index].write(logprobs).to_json())
                return self._text(index, text, "null") if text else b""
            case ReasoningDelta(text):
                return self._text(index, text, "null")
            case Finished():
                return self._chunks.choice(f'{{"index":{index},"text":"","logprobs":null,{self._finish(index, event)}')
            case _:
                return b""

    def _text(self, index: int, text: str, logprobs: str) -> bytes:
        fields = f'"index":{index},"text":{escape(text)},"logprobs":{logprobs},"finish_reason":null'
        return self._chunks.choice(f"{{{fields}}}")


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


def _usage(choices: Sequence[FoldedChoice], spec: ReplySpec) -> UsageReply:
    tally = UsageTally(spec.choices_per_prompt)
    for index, choice in enumerate(choices):
        tally.add(index, choice.finished.usage)
    return UsageReply.of(tally.total())


def _chat_choice(index: int, choice: FoldedChoice, spec: ReplySpec, names: TokenNames) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=_message(choice),
        logprobs=chat_logprobs(choice.logprobs, names) if spec.logprobs else None,
        finish_reason=finish_reason(choice.finished),
        stop_reason=choice.finished.stop,
    )


def _message(choice: FoldedChoice) -> MessageReply:
    text, reasoning = choice.text("text"), choice.text("reasoning") or None
    message = MessageReply(
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
