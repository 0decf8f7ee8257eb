"""What a record on disk is: computed state of some tokens, and a name that follows from them. It knows no files."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

VERSION = "2"
WORD_BYTES = 8
_NAME_BYTES = 20
_KINDS = ("run", "state")
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

Data = memoryview | Iterable[memoryview]
TensorData = tuple[str, str, tuple[int, ...], Data]  # name, dtype as safetensors spells it, shape, bytes in order


class Damaged(Exception):
    """The bytes are not the ones that were written, or this program did not write the file."""


class UnknownVersion(Exception):
    """An intact record of a format version that this program does not read."""


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int  # where its first byte is in the file
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a record holds. Of the JSON in `layout` and `rule`, this package knows only the place of the windows."""

    kind: Literal["run", "state"]
    fingerprint: str  # the checkpoint's
    salt: str
    parent: str  # name of the run that this one continues, or whose tokens the state follows; "" at position 0
    start: int  # position of the first token; of a state, the number of tokens before it
    words: bytes = b""  # one big-endian word of 8 bytes a token; a state has none
    layout: dict[str, Any]
    s_per_token: float
    rule: dict[str, Any]

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or len(self.words) % WORD_BYTES or bool(self.words) is not (self.kind == "run"):
            raise ValueError(f"{len(self.words)} bytes of words do not fit a record of the kind {self.kind}")
        if self.start < 0 or (self.start > 0) is not bool(self.parent):
            raise ValueError(f"a record that begins at {self.start} cannot have the parent {self.parent!r}")

    @property
    def end(self) -> int:
        return self.start + len(self.words) // WORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    name: str
    header: Header
    tensors: tuple[Tensor, ...]
    file_bytes: int
    used_s: float  # time of the last use
    digest: str  # the file header's: it differs between two files of the same name


def name_of(header: Header) -> str:
    """A name that follows from all tokens up to the record's end, because the parent's name is part of it."""
    identity = [VERSION, header.kind, header.fingerprint, header.salt, header.parent, header.start]
    identity.append(header.layout.get("window_offset", 0))  # the same tokens may be written again with their windows
    hashed = hashlib.blake2b(json.dumps(identity).encode(), digest_size=_NAME_BYTES, person=b"record")
    hashed.update(b"\0" + header.words)  # JSON has no zero byte, so no part can pass for another
    return hashed.hexdigest()


def checkpoint_folder(fingerprint: str) -> str:
    """Name of the folder that holds a checkpoint's records."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=8, person=b"folder").hexdigest()


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * _BITS[dtype] // 8
