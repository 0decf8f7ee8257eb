"""Remembers replies, and finds them in conversations that contain them. Knows messages and ids, but no template."""

import json
import threading
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import Any, Protocol, TypeVar

from ..core.messages import (
    DocumentPart,
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
from ..disk.kept import Journal, Kept
from ..util.lru import LRU
from .echo import DeclaredValue, calls_of, declared_arguments, is_echo
from .remembered import RememberedReply, can_be_kept, reply_value, restored_replies

MAX_REPLIES = 8192
MAX_BYTES = 64 << 20
DIGEST_BYTES = 16


class Entry(Hashable, Protocol):
    """An entry of `Recent`. It is hashed by its identity."""

    @property
    def num_bytes(self) -> int: ...


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, slots=True)
class RecalledConversation:
    """A conversation in which every remembered reply has replaced the client's version."""

    messages: tuple[Message, ...]
    key: bytes  # identifies all of the messages
    replies: tuple[RememberedReply, ...]  # in the order of the messages

    def longest(self, text: str) -> RememberedReply | None:
        """Return the reply with the longest prompt, among those whose complete prompt begins the rendered `text`."""
        best = None
        digest, position = text_digest(), 0
        for entry in sorted(self.replies, key=lambda entry: entry.text_length):
            if entry.text_length > len(text):
                break
            digest.update(_bytes(text[position : entry.text_length]))
            position = entry.text_length
            if digest.digest() == entry.text_digest:
                best = entry
        return best


class Recent(LRU[E, tuple[bytes, ...]]):
    """Entries that are found by their keys, which are the values of this store."""

    def __init__(self, max_entries: int, max_bytes: int):
        super().__init__(max_bytes, max_entries)
        self._by_key: dict[bytes, list[E]] = {}

    def find(self, key: bytes) -> Sequence[E]:
        """Return the entries that have the key, the latest last."""
        return self._by_key.get(key, ())

    def remember(self, entry: E, keys: tuple[bytes, ...]) -> None:
        self.add(entry, keys, entry.num_bytes)
        for key in keys:
            self._by_key.setdefault(key, []).append(entry)

    def evict(self, max_bytes: int | None = None, spared: Container[E] = ()) -> list[tuple[E, tuple[bytes, ...]]]:
        evicted = super().evict(max_bytes, spared)
        for entry, keys in evicted:
            for key in keys:
                self._by_key[key].remove(entry)
                if not self._by_key[key]:
                    del self._by_key[key]
        return evicted


class ReplyMemory:
    """Holds a bounded number of replies and bytes; evicts the least recently used. Threads may share it.

    Using an entry uses its base right after it. A base therefore stays at least as long as the entries that refer to
    it, and the bytes that are counted are the bytes that are held.
    """

    def __init__(self, *, max_replies: int = MAX_REPLIES, max_bytes: int = MAX_BYTES, journal: Journal | None = None):
        """`journal` keeps the replies for the next start, and gives back those of the last one."""
        self._lock = threading.Lock()
        self._recent: Recent[RememberedReply] = Recent(max_replies, max_bytes)
        self._journal = journal
        if journal is not None:
            journal.restore(self._restore)

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def entries(self) -> list[RememberedReply]:
        """Return all replies, the least recently used first."""
        return list(self._recent)

    @property
    def num_bytes(self) -> int:
        return self._recent.used_bytes

    def recall(self, salt: str, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RecalledConversation:
        """Find the replies in a conversation. Whether a message is one depends on all messages before it.

        `tools` are those of the request: clients fill in the argument defaults that these declare.
        """
        self._wait()
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
            self._use(replies)
        return RecalledConversation(tuple(result), key, tuple(replies))

    def add(self, entry: RememberedReply, prompt_token_ids: Sequence[int]) -> None:
        """Remember a reply.

        `prompt_token_ids` are all ids of its prompt, which are stored if the entry's base was evicted.
        """
        self._wait()
        with self._lock:
            if entry.base is not None and entry.base.entry not in self._recent:
                entry = entry.alone(prompt_token_ids)
            self._recent.remember(entry, (entry.key,))
            self._touch(entry)
            evicted = self._recent.evict()
            if self._journal is not None:
                self._keep(self._journal, entry, prompt_token_ids)
                self._journal.drop(other.name for other, _ in evicted)

    def _keep(self, journal: Journal, entry: RememberedReply, prompt_token_ids: Sequence[int]) -> None:
        """Keep an entry in the journal, without its base if the journal does not keep that."""
        if not can_be_kept(entry):
            return
        if entry.base is not None and entry.base.entry.name not in journal:
            entry = entry.alone(prompt_token_ids)
        base = None if entry.base is None else entry.base.entry.name
        journal.put(entry.name, entry.salt, partial(reply_value, entry), num_bytes=entry.num_bytes, base=base)

    def _restore(self, kept: list[Kept]) -> None:
        found = restored_replies(kept)
        with self._lock:
            for entry in found.values():
                self._recent.remember(entry, (entry.key,))
            for value in sorted(kept, key=lambda value: value.used):
                if value.name in found:
                    self._recent.get(found[value.name])
            evicted = [entry.name for entry, _ in self._recent.evict()]
        assert self._journal is not None
        self._journal.drop([*evicted, *(value.name for value in kept if value.name not in found)])

    def _wait(self) -> None:
        if self._journal is not None:
            self._journal.wait()

    def _find(self, key: bytes, message: Message, declared: Mapping[str, DeclaredValue]) -> RememberedReply | None:
        """Return the latest reply that the message repeats, preferably one with the same tool call ids."""
        known = reversed(self._recent.find(key))
        found = [entry for entry in known if is_echo(message, entry.reply.message, declared)]
        call_ids = [call.call_id for call in calls_of(message)]
        return max(found, key=lambda entry: call_ids == [call.call_id for call in entry.reply.calls], default=None)

    def _use(self, replies: Sequence[RememberedReply]) -> None:
        """Count the replies of one conversation as used, the last one first."""
        seen: set[RememberedReply] = set()
        for entry in reversed(replies):
            if entry not in seen:
                self._touch(entry)
                seen.update(entry.chain())
                if self._journal is not None:
                    self._journal.use([entry.name])

    def _touch(self, entry: RememberedReply) -> None:
        for link in entry.chain():
            self._recent.get(link)


def text_digest(text: str = "") -> blake2b:
    """Return the digest of a text, which `update` extends by the bytes of a further part."""
    return blake2b(_bytes(text), digest_size=DIGEST_BYTES)


def first_key(salt: str) -> bytes:
    """Return the key of an empty conversation."""
    return text_digest(salt).digest()


def next_key(key: bytes, message: Message) -> bytes:
    """Return the key of the conversation `key` after `message`. Neighbouring texts of a message count as one text."""
    separator = "" if message.role == "assistant" else "\n"
    parts: list[Any] = []
    for is_text, group in groupby(message.parts, lambda part: isinstance(part, TextPart)):
        keys = map(_part_key, group)
        parts += [separator.join(keys)] if is_text else keys
    described = _bytes(json.dumps([message.role, message.name, parts], ensure_ascii=False))
    return blake2b(key + described, digest_size=DIGEST_BYTES).digest()


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
        case DocumentPart():
            return ["document", part.source_digest.hex()]
        case ToolCallPart(call_id, name, arguments):
            return ["call", call_id, name, arguments]
        case ToolResultPart(call_id, content, name, is_error):
            return ["result", call_id, name, is_error, *map(_part_key, content)]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
