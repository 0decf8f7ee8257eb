"""Frames of an append-only file: each shows whether it is complete. Knows nothing of their contents.

A frame: three bytes that begin every frame, one for its form, its length, a checksum, its data. The two bytes 0xFE and
0xFF do not occur in UTF-8, so no text that a client sent can look like the beginning of a frame after a damaged one.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

Form = Literal[b"p", b"s"]  # plain, or sealed by a cipher
PLAIN: Form = b"p"
SEALED: Form = b"s"
_MARK = b"\xfe\xffJ"
_HEAD = struct.Struct(">3scI")
_CHECK_BYTES = 16
FRAME_BYTES = _HEAD.size + _CHECK_BYTES  # the size of a frame without data


@dataclass(frozen=True, slots=True)
class Frame:
    start: int
    end: int
    form: bytes
    data: bytes


def framed(data: bytes, identity: bytes, form: Form = PLAIN) -> bytes:
    """`identity` names the file, in at most 64 bytes. A frame counts as damaged in any other file."""
    head = _HEAD.pack(_MARK, form, len(data))
    return head + _check(head, data, identity) + data


def frames(content: bytes, identity: bytes) -> Iterator[Frame]:
    """The whole frames, in order. Whatever lies between them is damaged, and skipped."""
    start = content.find(_MARK)
    while 0 <= start <= len(content) - FRAME_BYTES:
        _, form, num_bytes = _HEAD.unpack_from(content, start)
        begin = start + FRAME_BYTES
        end = begin + num_bytes
        data = content[begin:end] if end <= len(content) else None
        head, check = content[start : start + _HEAD.size], content[start + _HEAD.size : begin]
        if data is not None and check == _check(head, data, identity):
            yield Frame(start, end, form, data)
            start = content.find(_MARK, end)
        else:
            start = content.find(_MARK, start + 1)


def _check(head: bytes, data: bytes, identity: bytes) -> bytes:
    digest = blake2b(head, digest_size=_CHECK_BYTES, key=identity)
    digest.update(data)
    return digest.digest()
