"""Places system messages where the template accepts them, which it finds by rendering probes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from ..core.messages import Message, Part, Role, TextPart, ToolResultPart

Render = Callable[[Sequence[Message]], str | None]  # returns None if the template refuses the conversation

REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # the form that Claude Code uses for older models

_MARKS = tuple(f"probe{number}." for number in range(9))


class SystemTurns:
    """Turns system messages that the template cannot write in their place into text of the message next to them.

    No message moves to the front and no turn is added, so the prompt still begins with the prompt of the messages
    before.
    """

    def __init__(self, render: Render):
        self._render = render

    def place(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the conversation in a form that the template writes completely and in order."""
        num_leading = next((n for n, m in enumerate(messages) if m.role != "system"), len(messages))
        leading, rest = list(messages[:num_leading]), list(messages[num_leading:])
        if leading and not self._takes_leading:
            return tuple(self._merged(leading, rest, "{}"))
        if num_leading > 1 and not self._takes_two:
            leading = [Message("system", tuple(part for message in leading for part in message.parts))]
        if any(message.role == "system" for message in rest) and not self._takes_between:
            rest = self._merged([], rest, REMINDER)
        return (*leading, *rest)

    def _merged(self, leading: Sequence[Message], rest: Sequence[Message], form: str) -> list[Message]:
        merging = _Merging()
        for message in leading:
            merging.feed_system(_text(message, form))
        for message in rest:
            if message.role == "system":
                merging.feed_system(_text(message, REMINDER))
            else:
                merging.feed(message)
        return merging.finish()

    @cached_property
    def _takes_leading(self) -> bool:
        return self._writes(("system", "user"))

    @cached_property
    def _takes_two(self) -> bool:
        return self._writes(("system", "system", "user"))

    @cached_property
    def _takes_between(self) -> bool:
        return self._writes(("system", "user", "system", "assistant", "user", "system", "assistant", "user"))

    def _writes(self, roles: Sequence[Role]) -> bool:
        """Whether the template writes every message once and in order: templates also drop and move messages."""
        marks = _MARKS[: len(roles)]
        messages = [Message(role, (TextPart(mark),)) for role, mark in zip(roles, marks, strict=True)]
        text = self._render(messages)
        if text is None or any(text.count(mark) != 1 for mark in marks):
            return False
        places = [text.find(mark) for mark in marks]
        if places != sorted(places):
            return False
        # A model would read a system message's text at the start of a reply as its own.
        between = itertools.pairwise(zip(places, roles, marks, strict=True))
        return not any(
            role == "system" and next_role == "assistant" and not text[place + len(mark) : next_place].strip()
            for (place, role, mark), (next_place, next_role, _) in between
        )


class _Merging:
    """Adds system texts to the end of the user message or tool result before them, or to the start of the next."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._waiting: list[TextPart] = []

    def feed_system(self, part: TextPart) -> None:
        if not part.text:
            return
        last = self._messages[-1] if self._messages and not self._waiting else None
        match last:
            case Message(role="user" | "tool") if last.parts:
                self._messages[-1] = replace(last, parts=(*last.parts[:-1], *_extended(last.parts[-1], part)))
            case _:
                self._waiting.append(part)

    def feed(self, message: Message) -> None:
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
