"""Whether a message that a client sends back is a reply that was given, as clients re-write replies. Pure."""

from typing import Any

from ..core.messages import MediaPart, Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart


def is_echo(message: Message, reply: Message) -> bool:
    """The same reply but for the white space around its texts, the order of arguments, and what was left out or added:

    the reasoning may be missing; a call sent back under its own id may have arguments that the model did not write.
    """
    if message.role != "assistant" or any(isinstance(part, MediaPart | ToolResultPart) for part in message.parts):
        return False
    reasoning = reasoning_of(message)
    return (
        text_of(message) == text_of(reply)
        and (not reasoning or reasoning == reasoning_of(reply))
        and _are_same_calls(calls_of(message), calls_of(reply))
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


def _are_same_calls(sent: list[ToolCallPart], written: list[ToolCallPart]) -> bool:
    return len(sent) == len(written) and all(map(_is_same_call, sent, written))


def _is_same_call(sent: ToolCallPart, written: ToolCallPart) -> bool:
    return sent.name == written.name and _is_same_value(
        sent.arguments, written.arguments, may_add=sent.call_id == written.call_id
    )


def _is_same_value(sent: Any, written: Any, *, may_add: bool = False) -> bool:
    """Equal JSON. A client whose language has one kind of number writes 1.0 as 1. `may_add`: objects may have more."""
    match sent, written:
        case dict(), dict():
            return (may_add or len(sent) == len(written)) and all(
                key in sent and _is_same_value(sent[key], value, may_add=may_add) for key, value in written.items()
            )
        case list(), list():
            return len(sent) == len(written) and all(
                _is_same_value(a, b, may_add=may_add) for a, b in zip(sent, written, strict=True)
            )
        case bool(), _:
            return sent is written
        case _, bool():
            return False
        case int() | float(), int() | float():
            return sent == written
        case _:
            return type(sent) is type(written) and bool(sent == written)
