"""One record as one file: a safetensors file that other programs can read too. It knows no folder and no limits.

The file's metadata says what the numbers belong to, and a tensor `words` has the tokens. Damage is found in three
ways: `digest` covers the complete header of the file, the record's name covers the tokens, and each tensor has a
checksum.

Checksums are XXH3 of 64 bits, which miss one of 2^64 damages. They guard against accidents, and are several times as
fast as a disk; CRC-32 and cryptographic hashes are slower than the SSD of a Mac.

All versions of the format keep two promises, so that damage differs from a version that is not known: the header begins
with the digest, which is taken with zeros in its own place, and `format` and `version` are in the metadata.
"""

import hashlib
import json
import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from xxhash import xxh3_64

from .record import (
    VERSION,
    WORD_BYTES,
    Damaged,
    Data,
    Header,
    Record,
    Tensor,
    TensorData,
    UnknownVersion,
    name_of,
    nbytes_of,
)

PIECE_BYTES = 4 << 20  # read or written at a time: few switches of threads, and mostly still in a processor's cache
_FORMAT = "vllm-mlx record"
_DIGEST_BYTES = 16
_NO_DIGEST = "0" * (2 * _DIGEST_BYTES)
_BEGIN = b'{"__metadata__":{"digest":"'
_DIGEST = slice(len(_BEGIN), len(_BEGIN) + len(_NO_DIGEST))
_FIRST_BYTES = 64 << 10  # one read holds the header and the words of nearly every record
_MAX_HEAD_BYTES = 64 << 20
_ALIGNMENT = 64  # the first tensor begins at a multiple of it, the others at a multiple of a word
_DESCRIBED = ("kind", "fingerprint", "salt", "parent", "start", "layout", "s_per_token", "rule")
_Spec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


class Draft:
    """A record that is to be written. Its name and its size are known before a byte is written."""

    def __init__(self, header: Header, tensors: Sequence[TensorData]):
        assert tensors and not any(name.startswith("pad.") for name, *_ in tensors), [name for name, *_ in tensors]
        self.header = header
        self.name = name_of(header)
        self._specs: list[_Spec] = [(name, dtype, tuple(shape)) for name, dtype, shape, _ in tensors]
        self._data = [data for *_, data in tensors]
        self._front = _reversed(header.words)
        front = [("words", "U64", (len(self._front) // WORD_BYTES,))] if self._front else []
        self._entries = list(_padded([*front, *self._specs]))
        self._head_bytes = len(self._head([0] * len(tensors)))
        ends, at = [], self._head_bytes
        for name, dtype, shape in self._entries:
            at += nbytes_of(dtype, shape)
            if not name.startswith("pad."):
                ends.append((at - nbytes_of(dtype, shape), at))
        self._places = ends[len(front) :]
        self.file_bytes = at

    def write(self, file: int) -> Record:
        """Write the record where the file's position is."""
        base = os.lseek(file, 0, os.SEEK_CUR)
        write_all(file, bytes(self._head_bytes))
        at = self._head_bytes + write_all(file, self._front)
        checksums = []
        for index, (start, end) in enumerate(self._places):
            at += write_all(file, bytes(start - at))
            checksum = xxh3_64()
            for piece in _pieces(self._data[index]):
                at += write_all(file, piece)
                checksum.update(piece)
            assert at == end, f"the bytes of {self._specs[index]} are not as many as its shape asks for"
            checksums.append(checksum.intdigest())
        write_all(file, bytes(self.file_bytes - at))
        head = self._head(checksums)  # only now known, but of the same size
        os.lseek(file, base, os.SEEK_SET)
        write_all(file, head)
        os.lseek(file, base + self.file_bytes, os.SEEK_SET)
        tensors = _tensors(self._specs, [start for start, _ in self._places], checksums)
        return Record(
            name=self.name,
            header=self.header,
            tensors=tensors,
            file_bytes=self.file_bytes,
            used_s=0.0,
            digest=head[8:][_DIGEST].decode(),
        )

    def _head(self, checksums: list[int]) -> bytes:
        """The file's header after its length. How long it is does not depend on the checksums."""
        metadata = {"digest": _NO_DIGEST, "format": _FORMAT, "version": VERSION}
        metadata["record"] = json.dumps(_described(self.header))
        metadata["checksums"] = " ".join(f"{checksum:016x}" for checksum in checksums)
        content: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for name, dtype, shape in self._entries:
            size = nbytes_of(dtype, shape)
            content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return struct.pack("<Q", len(text)) + _with_digest(text, _digest(text))


class Source:
    """An open file, or the `file_bytes` of it that begin at `base`."""

    def __init__(self, file: int, file_bytes: int, base: int = 0):
        self.file_bytes = file_bytes
        self._file, self._base = file, base

    def read(self, offset: int, size: int) -> bytes:
        """May return less, at the end."""
        return os.pread(self._file, max(0, min(size, self.file_bytes - offset)), self._base + offset)

    def read_into(self, offset: int, buffer: memoryview) -> Iterator[memoryview]:
        """Fill the buffer, and yield each part of it as soon as it is read. Raises Damaged where the file ends."""
        done = 0
        while done < len(buffer):
            part = buffer[done : done + PIECE_BYTES]
            count = self._read_part(self._base + offset + done, part)
            if not count:
                raise Damaged("it is cut short")
            yield part[:count]
            done += count

    def _read_part(self, offset: int, part: memoryview) -> int:
        if hasattr(os, "preadv"):  # macOS has it from version 11 on
            return os.preadv(self._file, [part], offset)
        data = os.pread(self._file, len(part), offset)
        part[: len(data)] = data
        return len(data)


def read_record(source: Source, name: str) -> Record:
    """Read and check a record's header and tokens, but no tensor. `name` is what the file's name promises.

    Raises Damaged and UnknownVersion.
    """
    first = source.read(0, _FIRST_BYTES)
    head_bytes = struct.unpack_from("<Q", first)[0] if len(first) >= 8 else 0
    if not _DIGEST.stop < head_bytes <= min(_MAX_HEAD_BYTES, source.file_bytes - 8):
        raise Damaged("its header is cut short")
    head = first[8 : 8 + head_bytes] if 8 + head_bytes <= len(first) else source.read(8, head_bytes)
    digest = head[_DIGEST]
    if not head.startswith(_BEGIN) or _digest(_with_digest(head, _NO_DIGEST.encode())) != digest:
        raise Damaged("its header is damaged")
    try:
        record = _parsed(source, first, head, name)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header makes no sense ({error!r})") from error
    if record.name != name_of(record.header):
        raise Damaged("its name does not fit its contents")
    return replace(record, digest=digest.decode())


def read_tensor(source: Source, record: Record, index: int, buffer: memoryview) -> None:
    """Read one tensor into a buffer of exactly its size, and check it. Raises Damaged."""
    tensor = record.tensors[index]
    assert buffer.nbytes == tensor.nbytes, f"a buffer of {buffer.nbytes} bytes for a tensor of {tensor.nbytes}"
    checksum = xxh3_64()
    for part in source.read_into(tensor.offset, buffer.cast("B")) if tensor.nbytes else ():
        checksum.update(part)  # while the system reads ahead
    if checksum.intdigest() != tensor.checksum:
        raise Damaged(f"its tensor {tensor.name} is damaged")


def write_all(file: int, data: bytes | memoryview) -> int:
    """Write all of it. Returns its size."""
    for piece in _pieces(memoryview(data)):
        done = 0
        while done < len(piece):
            done += os.write(file, piece[done:])
    return memoryview(data).nbytes


def _parsed(source: Source, first: bytes, head: bytes, name: str) -> Record:
    content = json.loads(head)
    metadata = content.pop("__metadata__")
    if metadata["format"] != _FORMAT:
        raise ValueError(metadata["format"])
    if metadata["version"] != VERSION:
        raise UnknownVersion(f"its format version is {metadata['version']}")
    base = 8 + len(head)
    places = {key: (base + entry["data_offsets"][0], base + entry["data_offsets"][1]) for key, entry in content.items()}
    if max(end for _, end in places.values()) != source.file_bytes:
        raise Damaged("it is cut short")

    def data(key: str) -> bytes:
        start, end = places.get(key, (0, 0))
        return first[start:end] if end <= len(first) else source.read(start, end - start)

    described, words = json.loads(metadata["record"]), _reversed(data("words"))
    stored = [key for key in content if not re.match(r"words$|pad\.", key)]
    specs = [(key, content[key]["dtype"], tuple(content[key]["shape"])) for key in stored]
    checksums = [int(text, 16) for text in metadata["checksums"].split()]
    header = Header(**{key: described[key] for key in _DESCRIBED}, words=words)
    tensors = _tensors(specs, [places[key][0] for key in stored], checksums)
    for tensor, key in zip(tensors, stored, strict=True):
        start, end = places[key]
        if end - start != tensor.nbytes:
            raise ValueError(f"the size of {key}")
    return Record(name=name, header=header, tensors=tensors, file_bytes=source.file_bytes, used_s=0.0, digest="")


def _tensors(specs: list[_Spec], offsets: list[int], checksums: list[int]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(name, dtype, shape, nbytes_of(dtype, shape), offset, checksum)
        for (name, dtype, shape), offset, checksum in zip(specs, offsets, checksums, strict=True)
    )


def _described(header: Header) -> dict[str, Any]:
    return {key: getattr(header, key) for key in _DESCRIBED}


def _padded(specs: list[_Spec]) -> Iterator[_Spec]:
    """Tensors of a few bytes between the others align these to a word. The format allows no holes."""
    assert len({name for name, *_ in specs}) == len(specs), "two tensors have the same name"
    for index, (name, dtype, shape) in enumerate(specs):
        yield name, dtype, shape
        if missing := -nbytes_of(dtype, shape) % WORD_BYTES:
            yield f"pad.{index}", "U8", (missing,)


def _pieces(data: Data) -> Iterator[memoryview]:
    for view in (data,) if isinstance(data, memoryview) else data:
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest().encode()


def _with_digest(text: bytes, digest: bytes) -> bytes:
    return text[: _DIGEST.start] + digest + text[_DIGEST.stop :]


def _reversed(words: bytes) -> bytes:
    """Big-endian words as little-endian ones, which safetensors asks for; and back."""
    array_ = array("Q", words)
    array_.byteswap()
    return array_.tobytes()
