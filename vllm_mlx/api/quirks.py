"""Known ways in which clients alter a conversation so that it is no longer its own prefix, and how each is handled.

Each row was seen on the wire, and a recorded request of that client is its test.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeGuard

from ..core.messages import Message, Part, TextPart

BILLING_HEADER = "x-anthropic-billing-header:"


@dataclass(frozen=True, slots=True)
class Quirk:
    name: str
    client: str
    seen_in: str  # versions
    sends: str
    handling: str


QUIRKS = (
    Quirk("billing_line", "Claude Code", "2.1.29 to 2.1.329",
        sends="a first system block with its version and a checksum that differs between sessions or requests",
        handling="the line is dropped, and the block with it when nothing else is in it"),
    Quirk("string_is_text", "Claude Code", "2.1.329",
        sends="a message as a list of one text block, and in the next request as a string",
        handling="both are the same message"),
    Quirk("cache_control", "Claude Code", "2.1.329",
        sends="cache marks that move to the last message with every request",
        handling="they never reach the prompt"),
    Quirk("system_in_the_middle", "Claude Code", "2.1.329",
        sends="system messages between others, for every model name that it does not know",
        handling="they stay where they are, as system messages; where the template takes none, as text of their "
        "neighbour"),
    Quirk("deferred_tools", "Claude Code", "2.1.329",
        sends="tools with `defer_loading`, put into the middle of the list once they are found",
        handling="they are not listed; their definition is text in the place where a tool_reference names them"),
    Quirk("tool_order", "all", "all",
        sends="tools in an order of its own, which it keeps",
        handling="the order is kept"),
    Quirk("item_ids", "Codex", "0.169.0",
        sends="ids on every item, new in every session",
        handling="they never reach the prompt"),
    Quirk("whitespace", "all", "all",
        sends="text and reasoning of earlier replies, with their original whitespace",
        handling="nothing is trimmed"),
)  # fmt: skip


def without_client_marks(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages without the lines that a client adds for its vendor's accounting; others are not changed."""
    return tuple(kept for message in messages if (kept := _without_billing(message)) is not None)


def _without_billing(message: Message) -> Message | None:
    if message.role != "system" or not any(map(_is_billed, message.parts)):
        return message
    parts: list[Part] = []
    for part in message.parts:
        if not _is_billed(part):
            parts.append(part)
        elif rest := part.text.partition("\n")[2]:
            parts.append(TextPart(rest))
    return replace(message, parts=tuple(parts)) if parts else None


def _is_billed(part: Part) -> TypeGuard[TextPart]:
    return isinstance(part, TextPart) and part.text.startswith(BILLING_HEADER)
