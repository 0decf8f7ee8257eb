"""Known ways in which clients alter a conversation so that it is no longer its own prefix, and how each is handled.

Each row was seen on the wire, and a recorded request of that client is its test.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.messages import Message, Part, TextPart

BILLING_HEADER = "x-anthropic-billing-header:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirk:
    name: str
    client: str
    seen_in: str  # versions
    sends: str
    handling: str


QUIRKS = (
    Quirk(
        name="billing_line",
        client="Claude Code",
        seen_in="2.1.29 to 2.1.329",
        sends="a first system block with its version and a checksum that differs between sessions or requests",
        handling="the line is dropped, and the block with it when nothing else is in it",
    ),
    Quirk(
        name="string_is_text",
        client="Claude Code",
        seen_in="2.1.329",
        sends="a message as a list of one text block, and in the next request as a string",
        handling="both are the same message",
    ),
    Quirk(
        name="cache_control",
        client="Claude Code",
        seen_in="2.1.329",
        sends="cache marks that move to the last message with every request",
        handling="they never reach the prompt",
    ),
    Quirk(
        name="system_in_the_middle",
        client="Claude Code",
        seen_in="2.1.329",
        sends="system messages between others, for every model name that it does not know",
        handling="they stay where they are, as system messages; where the template takes none, as text of their "
        "neighbour",
    ),
    Quirk(
        name="deferred_tools",
        client="Claude Code",
        seen_in="2.1.329",
        sends="tools with `defer_loading`, put into the middle of the list once they are found",
        handling="they are not listed; their definition is text in the place where a tool_reference names them",
    ),
    Quirk(
        name="tool_order",
        client="all",
        seen_in="all",
        sends="tools in an order of its own, which it keeps",
        handling="the order is kept",
    ),
    Quirk(
        name="item_ids",
        client="Codex",
        seen_in="0.169.0",
        sends="ids on every item, new in every session",
        handling="they never reach the prompt",
    ),
    Quirk(
        name="whitespace",
        client="all",
        seen_in="all",
        sends="text and reasoning of earlier replies, with their original whitespace",
        handling="nothing is trimmed",
    ),
)


def without_client_marks(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages without the lines that a client adds for its vendor's accounting; others are not changed."""
    cleaned = (message if message.role != "system" else _without_billing(message) for message in messages)
    return tuple(message for message in cleaned if message is not None)


def _without_billing(message: Message) -> Message | None:
    if not any(_is_billed(part) for part in message.parts):
        return message
    parts = tuple(kept for part in message.parts if (kept := _rest(part)) is not None)
    return replace(message, parts=parts) if parts else None


def _rest(part: Part) -> Part | None:
    if not _is_billed(part):
        return part
    assert isinstance(part, TextPart), "only text is billed"
    _, _, rest = part.text.partition("\n")
    return TextPart(rest) if rest else None


def _is_billed(part: Part) -> bool:
    return isinstance(part, TextPart) and part.text.startswith(BILLING_HEADER)
