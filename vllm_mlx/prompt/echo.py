"""Whether a message that a client sends back is a reply that was given, as clients re-write replies. Pure."""

from collections.abc import Mapping
from typing import Any

from ..core.messages import MediaPart, Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from .declared import Declared

_NO_TOOLS: Mapping[str, Declared] = {}


def is_echo(message: Message, reply: Message, tools: Mapping[str, Declared] = _NO_TOOLS) -> bool:
    """Whether the message says what the reply said. White space around texts and the order of arguments may differ.

    The reasoning may be missing. A call that is sent back under its own id may have further arguments, where each has
    the default that its tool in `tools` declares: clients fill these in. Anything else that was added is an edit.
    """
    if message.role != "assistant" or any(isinstance(part, MediaPart | ToolResultPart) for part in message.parts):
        return False
    reasoning = reasoning_of(message)
    return (
        text_of(message) == text_of(reply)
        and (not reasoning or reasoning == reasoning_of(reply))
        and _are_same_calls(calls_of(message), calls_of(reply), tools)
    )


def is_same(message: Message, reply: Message) -> bool:
    """The same reply, its reasoning included, but for white space around texts and the order of arguments."""
    one, other = calls_of(message), calls_of(reply)
    return (
        text_of(message) == text_of(reply)
        and reasoning_of(message) == reasoning_of(reply)
        and len(one) == len(other)
        and all(a.name == b.name and _is_same_value(a.arguments, b.arguments) for a, b in zip(one, other, strict=True))
    )


def text_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart)).strip()


def reasoning_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, ReasoningPart)).strip()


def calls_of(message: Message) -> list[ToolCallPart]:
    return [part for part in message.parts if isinstance(part, ToolCallPart)]


def _are_same_calls(sent: list[ToolCallPart], written: list[ToolCallPart], tools: Mapping[str, Declared]) -> bool:
    return len(sent) == len(written) and all(
        _is_same_call(a, b, tools.get(a.name)) for a, b in zip(sent, written, strict=True)
    )


def _is_same_call(sent: ToolCallPart, written: ToolCallPart, declared: Declared | None) -> bool:
    if sent.name != written.name:
        return False
    if _is_same_value(sent.arguments, written.arguments):
        return True
    is_own = sent.call_id == written.call_id
    return is_own and declared is not None and _is_same_value(sent.arguments, written.arguments, declared)


def _is_same_value(sent: Any, written: Any, declared: Declared | None = None) -> bool:
    """Whether both are the same JSON. A client whose language has one kind of number writes 1.0 as 1.

    With `declared`, objects in `sent` may have further properties that have the declared default.
    """
    match sent, written:
        case dict(), dict():
            return _is_same_object(sent, written, declared)
        case list(), list():
            items = None if declared is None else declared.items
            return len(sent) == len(written) and all(
                _is_same_value(a, b, items) for a, b in zip(sent, written, strict=True)
            )
        case bool(), _:
            return sent is written
        case _, bool():
            return False
        case int() | float(), int() | float():
            return sent == written
        case _:
            return type(sent) is type(written) and bool(sent == written)


def _is_same_object(sent: dict[str, Any], written: dict[str, Any], declared: Declared | None) -> bool:
    if len(sent) < len(written) or (declared is None and len(sent) > len(written)):
        return False
    for key, value in sent.items():
        known = None if declared is None else declared.argument(key)
        if key in written:
            if not _is_same_value(value, written[key], known):
                return False
        elif known is None or not any(_is_same_value(value, default) for default in known.defaults()):
            return False
    return all(key in sent for key in written)
