"""How fast a folder's disk reads, measured without the page cache."""

import fcntl
import os
import tempfile
import time
from pathlib import Path

from .record_file import PIECE_BYTES, Source, write_all

_MAX_BYTES = 64 << 20
_MAX_S = 0.2  # at most, to write, and again to read


def measure_read(folder: Path) -> float | None:
    """Bytes a second, from a temporary file of at most 64 MB; None if nothing can be written there.

    It takes well under a second also on a slow disk, which is measured with less. What is written counts towards no
    budget: it is a thousandth of the default one.
    """
    piece = memoryview(bytearray(os.urandom(PIECE_BYTES)))
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".speed-") as temporary:
            file = temporary.fileno()
            if hasattr(fcntl, "F_NOCACHE"):  # macOS: neither direction goes through the page cache
                fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
            size, begun_s = 0, time.perf_counter()
            while size < _MAX_BYTES and time.perf_counter() - begun_s < _MAX_S:
                size += write_all(file, piece)
                os.fsync(file)  # only what has reached the disk can leave the page cache
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            done, begun_s = 0, time.perf_counter()
            while done < size and time.perf_counter() - begun_s < _MAX_S:
                done += sum(len(part) for part in Source(file, size).read_into(done, piece))
            return done / max(time.perf_counter() - begun_s, 1e-9)
    except OSError:
        return None
