"""One reply as the model wrote it: its message and its ids. Knows no prompt and no template."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.events import ContentEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from ..core.messages import Message, Part, ReasoningPart, TextPart, ToolCallPart

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedReply:
    message: Message  # arguments in the order in which they were written
    token_ids: Sequence[int]  # all that were sampled until the reply ended, its stop token included
    is_complete: bool = True  # every call in it was closed and can be read

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
        """None: cut off, no JSON object, or one nested deeper than is worth comparing."""
        if not self.is_closed:
            return None
        try:
            value = json.loads("".join(self.arguments) or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) and is_flat(value) else None


class _Prose:
    def __init__(self, kind: type[TextPart] | type[ReasoningPart]):
        self.kind = kind
        self.texts: list[str] = []


class ReplyBuilder:
    """Folds the events of one reply. May be asked for the message at any time."""

    def __init__(self) -> None:
        self._parts: list[_Prose | _Call] = []
        self._calls: dict[int, _Call] = {}

    def feed(self, events: Iterable[ContentEvent]) -> None:
        for event in events:
            match event:
                case TextDelta(text):
                    self._prose(TextPart).texts.append(text)
                case ReasoningDelta(text):
                    self._prose(ReasoningPart).texts.append(text)
                case ToolCallStart(index):
                    self._calls[index] = _Call(event)
                    self._parts.append(self._calls[index])
                case ToolCallDelta(index, arguments):
                    self._calls[index].arguments.append(arguments)
                case ToolCallEnd(index):
                    self._calls[index].is_closed = True

    def message(self) -> Message:
        """A call that cannot be read has no arguments."""
        return Message("assistant", tuple(map(_part, self._parts)))

    @property
    def is_complete(self) -> bool:
        return all(call.read() is not None for call in self._calls.values())

    def _prose(self, kind: type[TextPart] | type[ReasoningPart]) -> _Prose:
        last = self._parts[-1] if self._parts else None
        if not isinstance(last, _Prose) or last.kind is not kind:
            last = _Prose(kind)
            self._parts.append(last)
        return last


def _part(part: _Prose | _Call) -> Part:
    if isinstance(part, _Prose):
        return part.kind("".join(part.texts))
    return ToolCallPart(part.start.call_id, part.start.name, part.read() or {})


def is_flat(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether JSON nests at most so deep."""
    match value:
        case dict():
            items = list(value.values())
        case list():
            items = value
        case _:
            return True
    return depth > 0 and all(is_flat(item, depth - 1) for item in items)
