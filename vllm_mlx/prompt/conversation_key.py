"""What a conversation is known by, message after message, and a text by its start. Pure."""

import json
from hashlib import blake2b
from itertools import groupby
from typing import Any

from ..core.messages import ImagePart, Message, Part, ReasoningPart, TextPart, ToolCallPart, ToolResultPart, VideoPart

_DIGEST_BYTES = 16


class TextDigest:
    """Of all the text fed so far."""

    def __init__(self, text: str = ""):
        self._hash = blake2b(_bytes(text), digest_size=_DIGEST_BYTES)

    def feed(self, text: str) -> None:
        self._hash.update(_bytes(text))

    def value(self) -> bytes:
        return self._hash.digest()


def first_key(salt: str) -> bytes:
    return _digest(_bytes(salt))


def next_key(key: bytes, message: Message) -> bytes:
    """The key of a conversation that goes on with `message`. Texts of one message count as one text."""
    separator = "" if message.role == "assistant" else "\n"
    parts: list[Any] = []
    for is_text, group in groupby(message.parts, lambda part: isinstance(part, TextPart)):
        keys = map(_part_key, group)
        parts += [separator.join(keys)] if is_text else keys
    return _digest(key + _bytes(json.dumps([message.role, message.name, parts], ensure_ascii=False)))


def _part_key(part: Part) -> Any:
    match part:
        case TextPart(text):
            return text
        case ReasoningPart(text):
            return ["reasoning", text]
        case ImagePart(max_side=max_side):
            return ["image", part.source_digest.hex(), max_side]
        case VideoPart(fps=fps):
            return ["video", part.source_digest.hex(), fps]
        case ToolCallPart(call_id, name, arguments):
            return ["call", call_id, name, arguments]
        case ToolResultPart(call_id, content, name, is_error):
            return ["result", call_id, name, is_error, *map(_part_key, content)]


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
