"""Remembers replies, and finds them in conversations that contain them. Knows messages and ids, but no template."""

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from sys import getsizeof
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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
from .echo import DeclaredValue, calls_of, declared_arguments, is_echo

MAX_REPLIES = 8192
MAX_BYTES = 64 << 20
_FIXED_BYTES = 2048  # the objects, keys and digests of one remembered reply
_BOUNDARY_BYTES = 128
_PART_BYTES = 64
_DIGEST_BYTES = 16


class Entry(Protocol):
    """What `Recent` holds. It is hashed by its identity."""

    @property
    def num_bytes(self) -> int: ...


E = TypeVar("E", bound=Entry)


class Boundary(NamedTuple):
    """A place in a rendered text that lies between two of its tokens."""

    num_chars: int  # before it
    num_tokens: int  # before it


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RememberedReply:
    """A reply and the prompt that it answered. The prompt's ids are those of `base`, then `tail`."""

    key: bytes  # identifies the messages before the reply
    text_length: int  # length of the rendered prompt, in characters
    text_digest: bytes
    base: "KnownPrefix | None" = None  # ids that come from an earlier reply of the conversation and its prompt
    tail: "array[int]" = field(default_factory=lambda: array("I"))
    boundaries: tuple[Boundary, ...] = ()  # known places behind `base` in the prompt, ascending
    reply: FinishedReply
    starts_in_reasoning: bool = False

    @property
    def base_end(self) -> Boundary:
        """The place in the prompt at which `base` ends and `tail` begins."""
        return Boundary(0, 0) if self.base is None else Boundary(self.base.num_chars, self.base.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self.base_end.num_tokens + len(self.tail)

    @property
    def num_bytes(self) -> int:
        """The memory that this reply holds, without its base."""
        own = _FIXED_BYTES + _BOUNDARY_BYTES * len(self.boundaries) + getsizeof(self.tail)
        return own + getsizeof(self.reply.token_ids) + sum(map(_part_bytes, self.reply.message.parts))

    def token_ids(self, end: int) -> list[int]:
        """The first `end` ids of the prompt and its reply."""
        runs: list[Sequence[int]] = []
        entry: RememberedReply | None = self
        while entry is not None and end > 0:
            num_base = entry.base_end.num_tokens
            runs.append(entry.reply.token_ids[: max(0, end - entry.num_prompt_tokens)])
            runs.append(entry.tail[: max(0, end - num_base)])
            end = min(end, num_base)
            entry = None if entry.base is None else entry.base.entry
        return [token_id for run in reversed(runs) for token_id in run]

    def token_id(self, index: int) -> int:
        """The id at `index` in the prompt and its reply."""
        entry = self
        while entry.base is not None and index < entry.base.num_tokens:
            entry = entry.base.entry
        offset = index - entry.num_prompt_tokens
        return entry.reply.token_ids[offset] if offset >= 0 else entry.tail[index - entry.base_end.num_tokens]

    def boundary_before(self, num_chars: int) -> Boundary:
        """The last known boundary within the first `num_chars` characters of the prompt."""
        entry = self
        while True:
            prompt_end = Boundary(entry.text_length, entry.num_prompt_tokens)
            for boundary in (prompt_end, *reversed(entry.boundaries)):
                if boundary.num_chars <= num_chars:
                    return boundary
            if entry.base is None or num_chars >= entry.base.num_chars:
                return entry.base_end
            entry = entry.base.entry


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """The first `num_tokens` ids of an earlier prompt and its reply stand for the first `num_chars` of a text."""

    entry: RememberedReply
    num_chars: int
    num_tokens: int

    @property
    def last_id(self) -> int:
        return self.entry.token_id(self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class RecalledConversation:
    """A conversation in which every remembered reply has replaced what the client sent for it."""

    messages: tuple[Message, ...]
    key: bytes  # identifies all of the messages
    replies: tuple[RememberedReply, ...]  # in the order of the messages

    def longest(self, text: str) -> RememberedReply | None:
        """The reply with the longest prompt among those whose complete prompt is a start of the rendered `text`."""
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


class Recent(Generic[E]):
    """A bounded number of entries and bytes, found by their keys; evicts the first. Not safe to share."""

    def __init__(self, max_entries: int, max_bytes: int):
        self.entries: OrderedDict[E, tuple[bytes, ...]] = OrderedDict()  # and their keys
        self.num_bytes = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._by_key: dict[bytes, list[E]] = {}

    def find(self, key: bytes) -> Sequence[E]:
        """The entries that have the key, the latest last."""
        return self._by_key.get(key, ())

    def add(self, entry: E, keys: tuple[bytes, ...]) -> None:
        self.entries[entry] = keys
        self.num_bytes += entry.num_bytes
        for key in keys:
            self._by_key.setdefault(key, []).append(entry)

    def evict(self) -> None:
        while self.entries and (len(self.entries) > self._max_entries or self.num_bytes > self._max_bytes):
            entry, keys = self.entries.popitem(last=False)
            self.num_bytes -= entry.num_bytes
            for key in keys:
                self._by_key[key].remove(entry)
                if not self._by_key[key]:
                    del self._by_key[key]


class ReplyMemory:
    """Holds a bounded number of replies and bytes; evicts the least recently used. Threads may share it.

    Using an entry uses its base right after it. A base therefore stays at least as long as the entries that refer to
    it, and the bytes that are counted are the bytes that are held.
    """

    def __init__(self, *, max_replies: int = MAX_REPLIES, max_bytes: int = MAX_BYTES):
        self._lock = threading.Lock()
        self._recent: Recent[RememberedReply] = Recent(max_replies, max_bytes)

    def __len__(self) -> int:
        return len(self._recent.entries)

    @property
    def num_bytes(self) -> int:
        return self._recent.num_bytes

    def recall(self, salt: str, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RecalledConversation:
        """Find the replies in a conversation. Whether a message is one depends on all messages before it.

        `tools` are those of the request: clients fill in the argument defaults that these declare.
        """
        key = first_key(salt)
        declared = declared_arguments(tools)
        result: list[Message] = []
        replies: list[RememberedReply] = []
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
        return RecalledConversation(tuple(result), key, tuple(replies))

    def add(self, entry: RememberedReply, prompt_token_ids: Sequence[int]) -> None:
        """`prompt_token_ids` are all ids of the prompt: they are stored where the entry's base was evicted."""
        with self._lock:
            if entry.base is not None and entry.base.entry not in self._recent.entries:
                boundaries = (entry.base_end, *entry.boundaries)
                entry = replace(entry, base=None, tail=array("I", prompt_token_ids), boundaries=boundaries)
            self._recent.add(entry, (entry.key,))
            self._touch(entry)
            self._recent.evict()

    def _find(self, key: bytes, message: Message, declared: Mapping[str, DeclaredValue]) -> RememberedReply | None:
        """The latest reply that the message repeats; one with the same tool call ids is preferred."""
        known = reversed(self._recent.find(key))
        found = [entry for entry in known if is_echo(message, entry.reply.message, declared)]
        call_ids = [call.call_id for call in calls_of(message)]
        return max(found, key=lambda entry: call_ids == [call.call_id for call in entry.reply.calls], default=None)

    def _touch(self, entry: RememberedReply) -> None:
        link: RememberedReply | None = entry
        while link is not None:
            self._recent.entries.move_to_end(link)
            link = None if link.base is None else link.base.entry


def _part_bytes(part: Part) -> int:
    match part:
        case TextPart(text) | ReasoningPart(text):
            return _PART_BYTES + getsizeof(text)
        case ToolCallPart(call_id, name, arguments):
            return _PART_BYTES + getsizeof(call_id) + getsizeof(name) + _json_bytes(arguments)
        case _:
            return _PART_BYTES


def _json_bytes(value: Any) -> int:
    """The memory that a JSON value takes. Objects that several values share are counted for each of them."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        total += getsizeof(item)
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item
    return total


class TextDigest:
    """The digest of a text that is fed in parts."""

    def __init__(self, text: str = ""):
        self._hash = blake2b(_bytes(text), digest_size=_DIGEST_BYTES)

    def feed(self, text: str) -> None:
        self._hash.update(_bytes(text))

    def value(self) -> bytes:
        return self._hash.digest()


def first_key(salt: str) -> bytes:
    """The key of an empty conversation."""
    return _digest(_bytes(salt))


def next_key(key: bytes, message: Message) -> bytes:
    """The key of the conversation `key` with `message` added. Neighbouring texts of a message count as one text."""
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
