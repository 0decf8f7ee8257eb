"""Workload set `records`: reading records of the cache on disk with all checks, beside a bare read of as many bytes.

On Linux, the page cache is dropped before each read, so the disk is measured; macOS has no call for it, and both reads
come from memory there. No checkpoint is read.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.record import Header, Record

from .figures import OURS, Aim, Figure

BARE_READ = "bare read"
_NUM_TENSORS, _TENSOR_BYTES = 64, 8 << 20  # slabs of a run
_MOST = 1.5  # times a bare read


def _record(folder: Folder) -> Record:
    numbers = memoryview(os.urandom(_TENSOR_BYTES))
    header = Header(
        kind="run",
        fingerprint="",
        salt="",
        parent="",
        start=0,
        words=bytes(8),
        layout={},
        s_per_token=0.0,
        rule=ResumeRule(),
    )
    return folder.add(header, [(f"{slab}", "U8", (_TENSOR_BYTES,), numbers) for slab in range(_NUM_TENSORS)])


def _uncached(path: Path) -> int:
    """An open file, no byte of which is in the page cache."""
    file = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def _bare(path: Path, buffer: memoryview) -> Callable[[], float]:
    def measure() -> float:
        file, done = _uncached(path), 0
        begun_s = time.perf_counter()
        for _ in range(_NUM_TENSORS):
            done += os.preadv(file, [buffer], done)
        elapsed_s = time.perf_counter() - begun_s
        os.close(file)
        return done / elapsed_s / 1e9

    return measure


def _checked(folder: Folder, record: Record, buffer: memoryview) -> Callable[[], float]:
    def measure() -> float:
        os.close(_uncached(folder.path_of(record)))
        begun_s = time.perf_counter()
        for index in range(_NUM_TENSORS):
            folder.read_into(record, index, buffer)
        return _NUM_TENSORS * _TENSOR_BYTES / (time.perf_counter() - begun_s) / 1e9

    return measure


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    """The figures, in GB/s."""
    buffer = memoryview(bytearray(_TENSOR_BYTES))
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(Path(root), max_bytes=1 << 40, daily_bytes=1 << 40, floor_bytes=0)
        record = _record(folder)
        measures = {OURS: _checked(folder, record, buffer), BARE_READ: _bare(folder.path_of(record), buffer)}
        aim = Aim(bound=1 / _MOST, at_least=True, against=BARE_READ)
        yield [Figure(name="reading", unit="GB/s", measures=measures, aims=(aim,))]
