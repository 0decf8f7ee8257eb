"""Remembered replies as JSON, for a journal, and back: every id, text and reference is the same afterwards."""

import base64
import binascii
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..core.messages import (
    DocumentPart,
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    VideoPart,
)
from ..disk.kept import Kept
from ..output.reply import FinishedReply
from .remembered import Boundary, KnownPrefix, RememberedReply

_LEVEL = 1  # zlib's fastest
MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RecursionError)


def reply_value(entry: RememberedReply) -> dict[str, Any]:
    """Return the reply as JSON, in which its base is a name."""
    base = entry.base
    return {
        "key": entry.key.hex(),
        "text": [entry.text_length, entry.text_digest.hex()],
        "base": None if base is None else [base.entry.name, base.num_chars, base.num_tokens],
        "tail": packed_ids(entry.tail),
        "boundaries": entry.boundaries,
        "message": message_value(entry.reply.message),
        "ids": packed_ids(entry.reply.token_ids),
        "is_complete": entry.reply.is_complete,
        "starts_in_reasoning": entry.starts_in_reasoning,
    }


def restored_replies(values: Iterable[Kept]) -> dict[str, RememberedReply]:
    """Read replies, by their names. A base precedes the replies that refer to it, which then share one object.

    A reply that cannot be read, or whose base is missing, is left out.
    """
    found: dict[str, RememberedReply] = {}
    for kept in values:
        try:
            found[kept.name] = _reply_of(kept, found)
        except MALFORMED:
            continue
    return found


def _reply_of(kept: Kept, found: dict[str, RememberedReply]) -> RememberedReply:
    """Raises one of `MALFORMED`."""
    value = kept.value()
    text_length, text_digest = value["text"]
    base = None
    if value["base"] is not None:
        name, num_chars, num_tokens = value["base"]
        base = KnownPrefix(found[name], num_chars, num_tokens)
    return RememberedReply(
        name=kept.name,
        salt=kept.salt,
        key=bytes.fromhex(value["key"]),
        text_length=text_length,
        text_digest=bytes.fromhex(text_digest),
        base=base,
        tail=unpacked_ids(value["tail"]),
        boundaries=tuple(Boundary(*boundary) for boundary in value["boundaries"]),
        reply=FinishedReply(
            message=message_of(value["message"]),
            token_ids=unpacked_ids(value["ids"]),
            is_complete=value["is_complete"],
        ),
        starts_in_reasoning=value["starts_in_reasoning"],
    )


def message_value(message: Message) -> list[Any]:
    return [message.role, message.name, [_part_value(part) for part in message.parts]]


def message_of(value: list[Any]) -> Message:
    """Raises ValueError for anything that `message_value` does not return."""
    role, name, parts = value
    return Message(role, tuple(map(_part_of, parts)), name)


def _part_value(part: Part) -> list[Any]:
    match part:
        case TextPart(text):
            return ["text", text]
        case ReasoningPart(text):
            return ["reasoning", text]
        case ToolCallPart(call_id, name, arguments):
            return ["call", call_id, name, arguments]
        case ToolResultPart(call_id, content, name, is_error):
            return ["result", call_id, [_part_value(item) for item in content], name, is_error]
        case ImagePart(source, max_side=max_side, text=text, param=param):
            return ["image", _source_value(source), max_side, text, param]
        case VideoPart(source, fps=fps, text=text, param=param):
            return ["video", _source_value(source), fps, text, param]
        case DocumentPart():
            raise AssertionError("documents are read before a prompt is rendered")


def _part_of(value: list[Any]) -> Any:
    match value:
        case ["text", text]:
            return TextPart(text)
        case ["reasoning", text]:
            return ReasoningPart(text)
        case ["call", call_id, name, arguments]:
            return ToolCallPart(call_id, name, arguments)
        case ["result", call_id, content, name, is_error]:
            return ToolResultPart(call_id, tuple(map(_part_of, content)), name, is_error)
        case ["image", source, max_side, text, param]:
            return ImagePart(_source_of(source), max_side=max_side, text=text, param=param)
        case ["video", source, fps, text, param]:
            return VideoPart(_source_of(source), fps=fps, text=text, param=param)
        case _:
            raise ValueError("it is no part of a message")


def _source_value(source: str | bytes | tuple[str, ...]) -> Any:
    """Return a text, its bytes as hex in an object, or a list of texts."""
    return {"hex": source.hex()} if isinstance(source, bytes) else source


def _source_of(value: Any) -> Any:
    match value:
        case {"hex": digits}:
            return bytes.fromhex(digits)
        case list():
            return tuple(value)
        case _:
            return value


def packed_ids(token_ids: Sequence[int]) -> str:
    """Pack ids into some two and a half characters each.

    Bytes of one weight follow each other, because the high ones are mostly 0.
    """
    planes = np.asarray(token_ids, "<u4").view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(planes.tobytes(), _LEVEL)).decode("ascii")


def unpacked_ids(packed: str) -> "array[int]":
    """Raises ValueError."""
    try:
        data = zlib.decompress(base64.b64decode(packed, validate=True))
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"it cannot be unpacked: {error}") from error
    planes = np.frombuffer(data, np.uint8).reshape(4, -1)
    return array("I", np.ascontiguousarray(planes.T).view("<u4").astype(np.uint32).tobytes())
