"""Replies given, found again in the conversations that contain them. Knows messages and ids, no template."""

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from sys import getsizeof
from typing import Any

from ..core.messages import (
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    ToolSpec,
    VideoPart,
)
from ..output.reply import FinishedReply
from .echo import Declared, calls_of, declared_arguments, is_echo

MAX_REPLIES = 8192
MAX_BYTES = 64 << 20
_FIXED_BYTES = 2048  # of one entry: its objects, keys and digests
_MARK_BYTES = 128
_PART_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Remembered:
    """A reply and the prompt it answered: `base`'s first `base_tokens` ids, then `tail`."""

    key: bytes  # of the messages before the reply
    text_length: int  # of the rendered prompt, in characters
    text_digest: bytes
    base: "Remembered | None" = None
    base_chars: int = 0  # of the prompt's text, for which the ids of `base` stand
    base_tokens: int = 0  # of the base's prompt and reply
    tail: "array[int]" = field(default_factory=lambda: array("I"))
    marks: tuple[tuple[int, int], ...] = ()  # (characters, tokens) of the prompt, ascending: boundaries behind `base`
    reply: FinishedReply
    starts_in_reasoning: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.base_tokens + len(self.tail)

    @property
    def num_bytes(self) -> int:
        own = _FIXED_BYTES + _MARK_BYTES * len(self.marks) + getsizeof(self.tail)
        return own + getsizeof(self.reply.token_ids) + sum(map(_part_bytes, self.reply.message.parts))

    def token_ids(self, end: int) -> list[int]:
        """The first `end` ids of prompt + reply."""
        runs: list[Sequence[int]] = []
        entry: Remembered | None = self
        while entry is not None and end > 0:
            runs.append(entry.reply.token_ids[: max(0, end - entry.num_prompt_tokens)])
            runs.append(entry.tail[: max(0, end - entry.base_tokens)])
            end = min(end, entry.base_tokens)
            entry = entry.base
        return [token_id for run in reversed(runs) for token_id in run]

    def token_id(self, index: int) -> int:
        entry = self
        while entry.base is not None and index < entry.base_tokens:
            entry = entry.base
        offset = index - entry.num_prompt_tokens
        return entry.reply.token_ids[offset] if offset >= 0 else entry.tail[index - entry.base_tokens]

    def mark(self, num_chars: int) -> tuple[int, int]:
        """The last known boundary (characters, tokens) of the prompt that lies within its first `num_chars`."""
        entry: Remembered | None = self
        while entry is not None:
            for mark in ((entry.text_length, entry.num_prompt_tokens), *reversed(entry.marks)):
                if mark[0] <= num_chars:
                    return mark
            num_chars = min(num_chars, entry.base_chars)
            if entry.base is not None and num_chars == entry.base_chars:
                return entry.base_chars, entry.base_tokens
            entry = entry.base
        return 0, 0


@dataclass(frozen=True, slots=True)
class Recalled:
    """A conversation in which every reply that is known stands as it was given."""

    messages: tuple[Message, ...]
    key: bytes
    replies: tuple[Remembered, ...]  # in order

    def longest(self, text: str) -> Remembered | None:
        """The reply whose whole prompt begins the rendered `text`; of several, the one with the longest."""
        best = None
        digest, position = TextDigest(), 0
        for entry in sorted(self.replies, key=lambda entry: entry.text_length):
            if entry.text_length > len(text):
                break
            digest.feed(text[position : entry.text_length])
            position = entry.text_length
            if digest.value() == entry.text_digest:
                best = entry
        return best


class ReplyMemory:
    """Bounded in replies and bytes; the least recently used go first. Safe to share between threads.

    An entry's base is always used later than itself, so it outlives it, and the bytes counted are those held.
    """

    def __init__(self, *, max_replies: int = MAX_REPLIES, max_bytes: int = MAX_BYTES):
        self._max_replies = max_replies
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._recency: OrderedDict[Remembered, None] = OrderedDict()
        self._by_key: dict[bytes, list[Remembered]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._recency)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def recall(self, salt: str, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Recalled:
        """Oldest first: that a reply is known depends on all that stands before it.

        `tools`: those of the request, whose defaults clients fill in.
        """
        key = first_key(salt)
        declared = declared_arguments(tools)
        result: list[Message] = []
        replies: list[Remembered] = []
        with self._lock:
            for message in messages:
                entry = self._find(key, message, declared) if message.role == "assistant" else None
                if entry is not None:
                    replies.append(entry)
                    message = entry.reply.message
                result.append(message)
                key = next_key(key, message)
            for entry in reversed(replies):
                self._touch(entry)
        return Recalled(tuple(result), key, tuple(replies))

    def add(self, entry: Remembered, prompt_token_ids: Sequence[int]) -> None:
        """`prompt_token_ids`: the whole prompt, for when the entry's base is no longer held."""
        with self._lock:
            if entry.base is not None and entry.base not in self._recency:
                entry = _without_base(entry, prompt_token_ids)
            self._by_key.setdefault(entry.key, []).append(entry)
            self._recency[entry] = None
            self._num_bytes += entry.num_bytes
            self._touch(entry)
            while self._recency and (len(self._recency) > self._max_replies or self._num_bytes > self._max_bytes):
                self._drop(next(iter(self._recency)))

    def clear(self) -> None:
        with self._lock:
            self._recency.clear()
            self._by_key.clear()
            self._num_bytes = 0

    def _find(self, key: bytes, message: Message, declared: Mapping[str, Declared]) -> Remembered | None:
        """The latest; one whose calls have the same ids before one whose calls only say the same."""
        known = reversed(self._by_key.get(key, ()))
        found = [entry for entry in known if is_echo(message, entry.reply.message, declared)]
        call_ids = [call.call_id for call in calls_of(message)]
        return max(found, key=lambda entry: call_ids == [call.call_id for call in entry.reply.calls], default=None)

    def _touch(self, entry: Remembered) -> None:
        link: Remembered | None = entry
        while link is not None:
            self._recency.move_to_end(link)
            link = link.base

    def _drop(self, entry: Remembered) -> None:
        del self._recency[entry]
        self._num_bytes -= entry.num_bytes
        siblings = self._by_key[entry.key]
        siblings.remove(entry)
        if not siblings:
            del self._by_key[entry.key]


def _without_base(entry: Remembered, prompt_token_ids: Sequence[int]) -> Remembered:
    return Remembered(
        key=entry.key,
        text_length=entry.text_length,
        text_digest=entry.text_digest,
        tail=array("I", prompt_token_ids),
        marks=((entry.base_chars, entry.base_tokens), *entry.marks),
        reply=entry.reply,
        starts_in_reasoning=entry.starts_in_reasoning,
    )


def _part_bytes(part: Part) -> int:
    match part:
        case TextPart(text) | ReasoningPart(text):
            return _PART_BYTES + getsizeof(text)
        case ToolCallPart(call_id, name, arguments):
            return _PART_BYTES + getsizeof(call_id) + getsizeof(name) + _json_bytes(arguments)
        case _:
            return _PART_BYTES


def _json_bytes(value: Any) -> int:
    """The memory that a JSON value takes. What several values share is counted for each of them."""
    total, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        total += getsizeof(each)
        if isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each
    return total


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
