"""Events → one whole reply. Reads the events that `encode` streams, so both replies say the same."""

from dataclasses import dataclass, field

from ...core.events import (
    Finished,
    GenerationEvent,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
)
from ..encoder import TokenNames
from ..reasoning import ReasoningView
from ..usage import UsageTally
from .decode import ReplySpec
from .encode import finish_reason
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


@dataclass(slots=True)
class _Call:
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def reply(self) -> ToolCallReply:
        function = FunctionReply(name=self.name, arguments="".join(self.arguments) or "{}")
        return ToolCallReply(id=self.call_id, type="function", function=function)


@dataclass(slots=True)
class _Choice:
    """What one choice has said so far."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished | None = None

    def feed(self, event: GenerationEvent) -> None:
        match event:
            case TextDelta(text, logprobs):
                self.texts.append(text)
                self.logprobs.extend(logprobs)
            case ReasoningDelta(text):
                self.reasoning.append(text)
            case ToolCallStart(index, call_id, name):
                self.calls[index] = _Call(call_id, name)
            case ToolCallDelta(index, arguments):
                self.calls[index].arguments.append(arguments)
            case Finished():
                self.end = event
            case _:
                pass

    @property
    def finished(self) -> Finished:
        assert self.end is not None, "a reply is folded after every choice has finished"
        return self.end

    def message(self) -> MessageReply:
        text, reasoning = "".join(self.texts), "".join(self.reasoning) or None
        message = MessageReply(
            role="assistant",
            content=None if self.calls and not text else text,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )
        if self.calls:
            message.tool_calls = [call.reply() for _, call in sorted(self.calls.items())]
        return message


class ChatFold:
    """`api.encoder.ReplyFold` of chat completions."""

    def __init__(self, spec: ReplySpec, names: TokenNames) -> None:
        self._spec = spec
        self._names = names
        self._views = [ReasoningView(spec.reasoning) for _ in range(spec.num_choices)]
        self._choices = [_Choice() for _ in range(spec.num_choices)]

    def feed(self, index: int, event: GenerationEvent) -> None:
        for each in self._views[index].feed(event):
            self._choices[index].feed(each)

    def finish(self) -> bytes:
        tally = UsageTally(self._spec.choices_per_prompt)
        for index, choice in enumerate(self._choices):
            tally.add(index, choice.finished.usage)
        reply = ChatCompletion(
            id=self._spec.reply_id,
            object="chat.completion",
            created=self._spec.created,
            model=self._spec.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(self._choices)],
            usage=UsageReply.of(tally.total()),
        )
        return reply.to_json().encode()

    def _choice(self, index: int, choice: _Choice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=choice.message(),
            logprobs=chat_logprobs(choice.logprobs, self._names) if self._spec.logprobs else None,
            finish_reason=finish_reason(choice.finished),
            stop_reason=choice.finished.stop,
        )


class CompletionFold:
    """`api.encoder.ReplyFold` of completions."""

    def __init__(self, spec: ReplySpec, names: TokenNames) -> None:
        self._spec = spec
        self._names = names
        self._choices = [_Choice() for _ in range(spec.num_choices)]

    def feed(self, index: int, event: GenerationEvent) -> None:
        # A text completion has one text: reasoning that the engine told apart belongs to it.
        self._choices[index].feed(TextDelta(event.text) if isinstance(event, ReasoningDelta) else event)

    def finish(self) -> bytes:
        tally = UsageTally(self._spec.choices_per_prompt)
        for index, choice in enumerate(self._choices):
            tally.add(index, choice.finished.usage)
        reply = Completion(
            id=self._spec.reply_id,
            object="text_completion",
            created=self._spec.created,
            model=self._spec.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(self._choices)],
            usage=UsageReply.of(tally.total()),
        )
        return reply.to_json().encode()

    def _choice(self, index: int, choice: _Choice) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text="".join(choice.texts),
            logprobs=CompletionLogprobWriter(self._names).write(choice.logprobs) if self._spec.logprobs else None,
            finish_reason=finish_reason(choice.finished),
            stop_reason=choice.finished.stop,
        )
