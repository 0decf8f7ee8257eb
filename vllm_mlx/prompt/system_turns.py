"""System messages for templates that take none, or take them at the start only. Knows messages; asks by rendering."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from ..core.messages import Message, Part, Role, TextPart, ToolResultPart

Render = Callable[[Sequence[Message]], str | None]  # None: the template refuses the conversation

REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # as Claude Code itself writes them for older models

_MARKS = tuple(f"probe{number}." for number in range(9))


class SystemTurns:
    """What a template cannot show as a system message where it stands becomes text of the message beside it.

    No message moves to the front and no turn is added: what came before stays the start of the prompt.
    """

    def __init__(self, render: Render):
        self._render = render

    def place(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        num_leading = next((n for n, m in enumerate(messages) if m.role != "system"), len(messages))
        leading, rest = list(messages[:num_leading]), list(messages[num_leading:])
        if leading and rest and not self._takes_leading:
            return tuple(self._folded(leading, rest, "{}"))
        if num_leading > 1 and not self._takes_two:
            leading = [Message("system", tuple(part for message in leading for part in message.parts))]
        if any(message.role == "system" for message in rest) and not self._takes_between:
            rest = self._folded([], rest, REMINDER)
        return (*leading, *rest)

    def _folded(self, leading: Sequence[Message], rest: Sequence[Message], form: str) -> list[Message]:
        fold = _Fold()
        for message in leading:
            fold.add_system(_text(message, form))
        for message in rest:
            if message.role == "system":
                fold.add_system(_text(message, REMINDER))
            else:
                fold.add(message)
        return fold.finish()

    @cached_property
    def _takes_leading(self) -> bool:
        return self._shows(("system", "user"))

    @cached_property
    def _takes_two(self) -> bool:
        return self._shows(("system", "system", "user"))

    @cached_property
    def _takes_between(self) -> bool:
        return self._shows(("system", "user", "system", "assistant", "user", "system", "assistant", "user"))

    def _shows(self, roles: Sequence[Role]) -> bool:
        """All messages, once each, in order: templates drop and move messages as often as they refuse them."""
        marks = _MARKS[: len(roles)]
        messages = [Message(role, (TextPart(mark),)) for role, mark in zip(roles, marks, strict=True)]
        text = self._render(messages)
        if text is None or any(text.count(mark) != 1 for mark in marks):
            return False
        places = [text.find(mark) for mark in marks]
        if places != sorted(places):
            return False
        # A reply that begins with a system message's text would be read as the model's own.
        between = itertools.pairwise(zip(places, roles, marks, strict=True))
        return not any(
            role == "system" and next_role == "assistant" and not text[place + len(mark) : next_place].strip()
            for (place, role, mark), (next_place, next_role, _) in between
        )


class _Fold:
    """System texts go to the end of the user's message or tool result before them, else to the start of the next."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._waiting: list[TextPart] = []

    def add_system(self, part: TextPart) -> None:
        if not part.text:
            return
        last = self._messages[-1] if self._messages and not self._waiting else None
        match last:
            case Message(role="user" | "tool") if last.parts:
                self._messages[-1] = replace(last, parts=(*last.parts[:-1], *_extended(last.parts[-1], part)))
            case _:
                self._waiting.append(part)

    def add(self, message: Message) -> None:
        if self._waiting and message.role == "user":
            message = replace(message, parts=(*self._waiting, *message.parts))
            self._waiting = []
        self._flush()
        self._messages.append(message)

    def finish(self) -> list[Message]:
        self._flush()
        return self._messages

    def _flush(self) -> None:
        if self._waiting:
            self._messages.append(Message("user", tuple(self._waiting)))
            self._waiting = []


def _extended(part: Part, text: TextPart) -> tuple[Part, ...]:
    if isinstance(part, ToolResultPart):
        return (replace(part, content=(*part.content, text)),)
    return (part, text)


def _text(message: Message, form: str) -> TextPart:
    text = "\n".join(part.text for part in message.parts if isinstance(part, TextPart))
    return TextPart(form.format(text) if text else "")
