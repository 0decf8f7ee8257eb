"""One reply as the model wrote it: its message and its ids. Knows no prompt and no template."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.events import ContentEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from ..core.messages import Message, Part, ReasoningPart, TextPart, ToolCallPart
from ..util.json_values import is_deeper

MAX_DEPTH = 64  # of the arguments of a call


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedReply:
    """A reply that has ended. One that was aborted counts as finished where it was cut."""

    message: Message  # the arguments of calls are in the order in which they were written
    token_ids: Sequence[int]  # all that were sampled until the reply ended, its stop token included
    is_complete: bool = True  # the model closed every call, and its arguments can be read

    @property
    def has_reasoning(self) -> bool:
        return any(isinstance(part, ReasoningPart) for part in self.message.parts)

    @property
    def calls(self) -> tuple[ToolCallPart, ...]:
        return tuple(part for part in self.message.parts if isinstance(part, ToolCallPart))


class _Call:
    def __init__(self, start: ToolCallStart):
        self.start = start
        self.arguments: list[str] = []
        self.is_closed = False

    def read(self) -> dict[str, Any] | None:
        """Return the arguments, or None if they were cut, are not a JSON object, or nest deeper than `MAX_DEPTH`."""
        if not self.is_closed:
            return None
        try:
            value = json.loads("".join(self.arguments) or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) and not is_deeper(value, MAX_DEPTH) else None


class _TextRun:
    def __init__(self, kind: type[TextPart] | type[ReasoningPart]):
        self.kind = kind
        self.texts: list[str] = []


class ReplyBuilder:
    """Collects the ids and events of one reply. It can be asked for the reply at any time."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._parts: list[_TextRun | _Call] = []
        self._calls: dict[int, _Call] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def add_token(self, token_id: int) -> None:
        self._token_ids.append(token_id)

    def feed(self, events: Iterable[ContentEvent]) -> None:
        for event in events:
            match event:
                case TextDelta(text):
                    self._text_run(TextPart).texts.append(text)
                case ReasoningDelta(text):
                    self._text_run(ReasoningPart).texts.append(text)
                case ToolCallStart(index):
                    self._calls[index] = _Call(event)
                    self._parts.append(self._calls[index])
                case ToolCallDelta(index, arguments):
                    self._calls[index].arguments.append(arguments)
                case ToolCallEnd(index, is_broken):
                    self._calls[index].is_closed = not is_broken

    def reply(self, *, is_cut: bool = False) -> FinishedReply:
        """Return the reply so far. `is_cut`: a call was completed that the model had left open."""
        is_complete = self.is_complete and not is_cut
        return FinishedReply(message=self.message(), token_ids=tuple(self._token_ids), is_complete=is_complete)

    def message(self) -> Message:
        """Return the message so far. A call whose arguments cannot be read has empty arguments."""
        return Message("assistant", tuple(map(_part, self._parts)))

    @property
    def is_complete(self) -> bool:
        """Return whether every call is closed and can be read."""
        return all(call.read() is not None for call in self._calls.values())

    def _text_run(self, kind: type[TextPart] | type[ReasoningPart]) -> _TextRun:
        last = self._parts[-1] if self._parts else None
        if not isinstance(last, _TextRun) or last.kind is not kind:
            last = _TextRun(kind)
            self._parts.append(last)
        return last


def _part(part: _TextRun | _Call) -> Part:
    if isinstance(part, _TextRun):
        return part.kind("".join(part.texts))
    return ToolCallPart(part.start.call_id, part.start.name, part.read() or {})


def content_of(message: Message) -> list[ContentEvent]:
    """Return the reasoning of a message as text, if the message has no visible text and no calls."""
    shown = "".join(part.text for part in message.parts if isinstance(part, TextPart))
    if shown.strip() or any(isinstance(part, ToolCallPart) for part in message.parts):
        return []
    text = "".join(part.text for part in message.parts if isinstance(part, ReasoningPart))
    return [TextDelta(text)] if text else []
