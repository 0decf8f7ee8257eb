"""The file of a record: its tensors one after the other. A row of the database describes them."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from xxhash import xxh3_64

from .faults import Damaged
from .record import Data, Tensor, TensorData, tensors_of

PIECE_BYTES = 4 << 20  # read or written at a time: threads switch seldom, and the piece mostly stays in a cache
_GONE = (errno.EIO, errno.ELOOP, errno.EISDIR)  # the file cannot be read, or another program has replaced it


def size_of(tensors: Sequence[TensorData]) -> int:
    return sum(tensor.nbytes for tensor in tensors_of((*spec, 0) for *spec, _ in tensors))  # type: ignore[misc]


def write(path: Path, tensors: Sequence[TensorData]) -> tuple[Tensor, ...]:
    """Write a new file. Raises OSError, and leaves a part of the file then."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        found = tensors_of([(name, dtype, tuple(shape), _written(file, data)) for name, dtype, shape, data in tensors])
        size = os.fstat(file).st_size
        assert size == sum(tensor.nbytes for tensor in found), f"{size} bytes do not fit the shapes of {tensors}"
    finally:
        os.close(file)
    return found


def read_tensor(path: Path, tensor: Tensor, buffer: memoryview) -> None:
    """Read one tensor into a buffer of exactly its size, and check it. Raises Damaged, and OSError of the disk."""
    assert buffer.nbytes == tensor.nbytes, f"a buffer of {buffer.nbytes} bytes for a tensor of {tensor.nbytes}"
    checksum = xxh3_64()
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for piece in _read(file, tensor.offset, buffer.cast("B")) if tensor.nbytes else ():
                checksum.update(piece)  # while the system reads ahead
        finally:
            os.close(file)
    except FileNotFoundError as error:
        raise Damaged("its file is missing") from error
    except OSError as error:
        if error.errno not in _GONE:
            raise
        raise Damaged(str(error.strerror)) from error
    if checksum.intdigest() != tensor.checksum:
        raise Damaged(f"its tensor {tensor.name} is damaged")


def _written(file: int, data: Data) -> int:
    """Write the bytes of a tensor, and return their checksum."""
    checksum = xxh3_64()
    for view in (data,) if isinstance(data, memoryview) else data:
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, len(flat), PIECE_BYTES):
            piece, done = flat[start : start + PIECE_BYTES], 0
            checksum.update(piece)
            while done < len(piece):
                done += os.write(file, piece[done:])
    return checksum.intdigest()


def _read(file: int, offset: int, buffer: memoryview) -> Iterator[memoryview]:
    """Fill the buffer, and yield each part of it as soon as it is read."""
    done = 0
    while done < len(buffer):
        part = buffer[done : done + PIECE_BYTES]
        count = _read_part(file, offset + done, part)
        if not count:
            raise Damaged("it is cut short")
        yield part[:count]
        done += count


def _read_part(file: int, offset: int, part: memoryview) -> int:
    if hasattr(os, "preadv"):  # macOS has it from version 11 on
        return os.preadv(file, [part], offset)
    data = os.pread(file, len(part), offset)
    part[: len(data)] = data
    return len(data)
