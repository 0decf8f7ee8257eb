"""One remembered reply: the ids that a prompt takes from it and from the prompt before it, and its form on disk."""

import base64
import binascii
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from secrets import token_urlsafe
from sys import getsizeof
from typing import Any, NamedTuple

import numpy as np

from ..core.messages import Message, Part, ReasoningPart, TextPart, ToolCallPart
from ..core.request import Request
from ..core.sequence import PromptInputs
from ..disk.kept import Kept
from ..formats.reply import FinishedReply

_FIXED_BYTES = 2048  # the objects, keys and digests of one remembered reply
_BOUNDARY_BYTES = 128
_PART_BYTES = 64
_LEVEL = 1  # zlib's fastest
_NAME_BYTES = 9  # random
_KINDS: dict[str, type[Any]] = {"text": TextPart, "reasoning": ReasoningPart, "call": ToolCallPart}
_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RecursionError)


class Boundary(NamedTuple):
    """A place in a rendered text that lies between two of its tokens."""

    num_chars: int  # before it
    num_tokens: int  # before it


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RememberedReply:
    """A reply and the prompt that it answered. The prompt's ids are those of `base`, then `tail`."""

    name: str = field(default_factory=lambda: token_urlsafe(_NAME_BYTES))  # in a journal
    salt: str = ""
    key: bytes  # identifies the messages before the reply
    text_length: int  # length of the rendered prompt, in characters
    text_digest: bytes
    base: "KnownPrefix | None" = None  # ids that come from an earlier reply of the conversation and its prompt
    tail: "array[int]" = field(default_factory=lambda: array("I"))
    boundaries: tuple[Boundary, ...] = ()  # known places after `base` in the prompt, ascending
    reply: FinishedReply
    starts_in_reasoning: bool = False

    @property
    def base_end(self) -> Boundary:
        """Return the place in the prompt at which `base` ends and `tail` begins."""
        return Boundary(0, 0) if self.base is None else Boundary(self.base.num_chars, self.base.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self.base_end.num_tokens + len(self.tail)

    @property
    def num_bytes(self) -> int:
        """Return the memory that this reply holds, without its base."""
        own = _FIXED_BYTES + _BOUNDARY_BYTES * len(self.boundaries) + getsizeof(self.tail)
        return own + getsizeof(self.reply.token_ids) + sum(map(_part_bytes, self.reply.message.parts))

    def alone(self, prompt_token_ids: Sequence[int]) -> "RememberedReply":
        """Return the same reply without a base. `prompt_token_ids`: all ids of the prompt."""
        boundaries = (self.base_end, *self.boundaries)
        return replace(self, base=None, tail=array("I", prompt_token_ids), boundaries=boundaries)

    def chain(self) -> "Iterator[RememberedReply]":
        """Yield this reply, its base, the base's own base and so on."""
        entry: RememberedReply | None = self
        while entry is not None:
            yield entry
            entry = None if entry.base is None else entry.base.entry

    def token_ids(self, end: int) -> list[int]:
        """Return the first `end` ids of the prompt and its reply."""
        runs: list[Sequence[int]] = []
        for entry in self.chain():
            num_base = entry.base_end.num_tokens
            runs.append(entry.reply.token_ids[: max(0, end - entry.num_prompt_tokens)])
            runs.append(entry.tail[: max(0, end - num_base)])
            end = min(end, num_base)
        return [token_id for run in reversed(runs) for token_id in run]

    def token_id(self, index: int) -> int:
        """Return the id at `index` in the prompt and its reply."""
        entry = self
        while entry.base is not None and index < entry.base.num_tokens:
            entry = entry.base.entry
        offset = index - entry.num_prompt_tokens
        return entry.reply.token_ids[offset] if offset >= 0 else entry.tail[index - entry.base_end.num_tokens]

    def boundary_before(self, num_chars: int) -> Boundary:
        """Return the last known boundary within the first `num_chars` characters of the prompt."""
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
    """The first `num_tokens` ids of an earlier prompt and its reply cover the first `num_chars` of a text."""

    entry: RememberedReply
    num_chars: int
    num_tokens: int

    @property
    def last_id(self) -> int:
        return self.entry.token_id(self.num_tokens - 1)


def _part_bytes(part: Part) -> int:
    match part:
        case TextPart(text) | ReasoningPart(text):
            return _PART_BYTES + getsizeof(text)
        case ToolCallPart(call_id, name, arguments):
            return _PART_BYTES + getsizeof(call_id) + getsizeof(name) + _json_bytes(arguments)
        case _:
            return _PART_BYTES


def _json_bytes(value: Any) -> int:
    """Return the memory that a JSON value takes. Objects that several values share are counted for each of them."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        total += getsizeof(item)
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item
    return total


# The form on disk


def can_be_kept(entry: RememberedReply) -> bool:
    """Return whether the reply has a form on disk. A reply that continues a client's message with an image has none."""
    return all(isinstance(part, tuple(_KINDS.values())) for part in entry.reply.message.parts)


def reply_value(entry: RememberedReply) -> dict[str, Any]:
    """Return the reply as JSON, in which its base is a name."""
    base, message = entry.base, entry.reply.message
    return {
        "key": entry.key.hex(),
        "text": [entry.text_length, entry.text_digest.hex()],
        "base": None if base is None else [base.entry.name, base.num_chars, base.num_tokens],
        "tail": packed_ids(entry.tail),
        "boundaries": entry.boundaries,
        "message": [message.role, message.name, list(map(_part_value, message.parts))],
        "ids": packed_ids(entry.reply.token_ids),
        "is_complete": entry.reply.is_complete,
        "starts_in_reasoning": entry.starts_in_reasoning,
    }


def _part_value(part: Part) -> list[Any]:
    [name] = [name for name, kind in _KINDS.items() if type(part) is kind]  # `can_be_kept` refuses others
    return [name, *(getattr(part, field.name) for field in fields(part))]


def restored_replies(values: Iterable[Kept]) -> dict[str, RememberedReply]:
    """Read replies, by their names. A base precedes the replies that refer to it, which then share one object.

    A reply that cannot be read, or whose base is missing, is left out.
    """
    found: dict[str, RememberedReply] = {}
    for kept in values:
        try:
            found[kept.name] = _reply_of(kept, found)
        except _MALFORMED:
            continue
    return found


def _reply_of(kept: Kept, found: dict[str, RememberedReply]) -> RememberedReply:
    """Raise one of `_MALFORMED`."""
    value = kept.value()
    text_length, text_digest = value["text"]
    role, message_name, parts = value["message"]
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
            message=Message(role, tuple(_KINDS[kind](*fields) for kind, *fields in parts), message_name),
            token_ids=unpacked_ids(value["ids"]),
            is_complete=value["is_complete"],
        ),
        starts_in_reasoning=value["starts_in_reasoning"],
    )


def packed_ids(token_ids: Sequence[int]) -> str:
    """Return about 2.5 characters for an id. Bytes of one weight are adjacent: the high ones are mostly 0."""
    planes = np.asarray(token_ids, "<u4").view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(planes.tobytes(), _LEVEL)).decode("ascii")


def unpacked_ids(packed: str) -> "array[int]":
    """Raise ValueError."""
    try:
        data = zlib.decompress(base64.b64decode(packed, validate=True))
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"it cannot be unpacked: {error}") from error
    planes = np.frombuffer(data, np.uint8).reshape(4, -1)
    return array("I", np.ascontiguousarray(planes.T).view("<u4").astype(np.uint32).tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The prompt of one chat request, and the facts needed to remember its reply."""

    request: Request  # its messages have remembered replies instead of the client's versions
    key: bytes  # identifies the messages in the reply memory
    text: str  # the text that the template rendered
    inputs: PromptInputs
    known_prefix: KnownPrefix | None = None  # the ids that come from an earlier prompt and its reply
    boundaries: tuple[Boundary, ...] = ()  # starts of images, and snapshot points or else the conversation's end
    rules: tuple[str, ...] = ()  # the rules by which the conversation was rewritten for its template

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.inputs.token_ids
