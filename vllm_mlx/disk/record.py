"""A record on disk: computed state of some tokens, described by one row of the database. It knows no files."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import isfinite, prod
from typing import Any, Literal

from xxhash import xxh3_64

from ..cache.index import WORD_BYTES
from ..cache.node import ResumeRule
from .faults import Damaged

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64"), 64),
}
_DESCRIBED = ("kind", "fingerprint", "salt", "parent", "start", "layout", "s_per_token")

Data = memoryview | Iterable[memoryview]
TensorData = tuple[str, str, tuple[int, ...], Data]  # name, dtype, shape, bytes in order
Row = tuple[int, bytes, bytes, float, bytes]  # id, description as JSON, words, time of the last use, checksum


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int  # where its first byte is in the file
    checksum: int  # XXH3 of 64 bits: it finds accidents, and is faster than any disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The content of a record. Only `arrays` knows the meaning of the JSON in `layout`."""

    kind: Literal["run", "state"]
    fingerprint: str  # the checkpoint's
    salt: str
    parent: str  # name of the run that this one continues, or whose tokens the state follows; "" at position 0
    start: int  # position of the first token; of a state, the number of tokens before it
    words: bytes = b""  # one big-endian word of 8 bytes a token; a state has none
    layout: dict[str, Any]
    s_per_token: float
    rule: ResumeRule  # the checkpoint's

    @property
    def end(self) -> int:
        return self.start + len(self.words) // WORD_BYTES

    def continues(self, parent: "Header | None") -> bool:
        """Return whether the record can follow its parent, if it has one: it begins in its tokens or after them."""
        return not self.parent or (parent is not None and parent.start < self.start <= parent.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    name: str  # its id, and the name of its file
    header: Header
    tensors: tuple[Tensor, ...]
    file_bytes: int
    used_s: float  # time of the last use


def name_of(row_id: int) -> str:
    return f"{row_id:016x}"


def tensors_of(specs: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[Tensor, ...]:
    """Describe tensors that follow each other in a file, by their names, dtypes, shapes and checksums."""
    specs = list(specs)
    sizes = [prod(shape) * _BITS[dtype] // 8 for _, dtype, shape, _ in specs]
    return tuple(
        Tensor(name, dtype, shape, size, end - size, checksum)
        for (name, dtype, shape, checksum), size, end in zip(specs, sizes, accumulate(sizes), strict=True)
    )


def row_of(record: Record) -> Row:
    about = {key: getattr(record.header, key) for key in _DESCRIBED}
    about["rule"] = asdict(record.header.rule)
    about["tensors"] = [[tensor.name, tensor.dtype, tensor.shape, tensor.checksum] for tensor in record.tensors]
    row_id, text = int(record.name, 16), json.dumps(about, separators=(",", ":")).encode()
    return row_id, text, record.header.words, record.used_s, _checksum(row_id, text, record.header.words)


def record_of(row: Row) -> Record:
    """Raise Damaged. A damaged time of the last use counts as long ago."""
    row_id, text, words, used_s, checksum = row
    is_intact = isinstance(text, bytes) and isinstance(words, bytes) and checksum == _checksum(row_id, text, words)
    if not is_intact:
        raise Damaged("its row is damaged")
    about = json.loads(text)
    tensors = tensors_of((name, dtype, tuple(shape), checksum) for name, dtype, shape, checksum in about.pop("tensors"))
    header = Header(**{**about, "rule": ResumeRule(**about["rule"])}, words=words)
    return Record(
        name=name_of(row_id),
        header=header,
        tensors=tensors,
        file_bytes=sum(tensor.nbytes for tensor in tensors),
        used_s=used_s if isinstance(used_s, float) and isfinite(used_s) else 0.0,
    )


def _checksum(row_id: int, text: bytes, words: bytes) -> bytes:
    return xxh3_64(row_id.to_bytes(8, "big", signed=True) + len(text).to_bytes(8, "big") + text + words).digest()
