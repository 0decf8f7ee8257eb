"""The file of one journal: read, appended to and compacted beside other servers. Knows no thread and no queue."""

import fcntl
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from .frames import PLAIN, SEALED, Frame, framed, frames
from .own_files import journal_files
from .replay import Replay, use_record

logger = logging.getLogger(__name__)

VERSION = 1  # a file of another version of the format has another name
_SUFFIX = f".v{VERSION}.journal"
_TEMPORARY = ".new"
Charge = Callable[[int], bool]  # bytes that are about to be written -> whether they may be
_FULL_SHARE = 3 / 4  # the part of a full file that stays
_LOCK_S = 10.0  # to wait for another server that writes
_LOOK_S = 0.02


class Cipher(Protocol):
    def seal(self, data: bytes, context: bytes) -> bytes: ...

    def open(self, sealed: bytes, context: bytes) -> bytes | None:
        """What was sealed; None if it was changed, or sealed with another key or for another context."""
        ...


class JournalFile:
    """Used by one thread. Any method may raise OSError."""

    def __init__(self, folder: Path, name: str, *, max_bytes: int, cipher: Cipher | None):
        self.path = folder / f"{name}{_SUFFIX}"
        self.max_bytes = max_bytes
        self._identity = blake2b(f"{VERSION} {name}".encode(), digest_size=32).digest()
        self._cipher = cipher

    def frame(self, record: bytes) -> bytes:
        if self._cipher is None:
            return framed(record, self._identity, PLAIN)
        return framed(self._cipher.seal(record, self._identity), self._identity, SEALED)

    def read(self) -> tuple[Replay, int]:
        """What is kept, and the size of the file. It takes no lock: what another server is just writing is left out."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        return self._replay(content), len(content)

    def append(self, data: bytes) -> int:
        """Write whole frames, and return the size of the file before."""
        with self._locked() as file:
            num_before = os.fstat(file).st_size
            try:
                _write(file, data)
            except OSError:
                os.ftruncate(file, num_before)
                raise
            return num_before

    def compact(self, charge: Charge, *, room: int = 0, clears: str | None = None) -> Replay | None:
        """Leave out what is dropped, and of a file that is full what was not used for longest.

        `room`: bytes that are to be appended next. `clears`: salts that begin so are left out, at any time.
        Returns what is kept, or None if nothing may be written now.
        """
        with self._locked() as file:
            replay = self._replay(_read(file))
            if clears is not None:
                replay.clear(clears)
            if replay.num_bytes + room > self.max_bytes:
                replay.shrink(min(int(self.max_bytes * _FULL_SHARE), max(0, self.max_bytes - room)))
            kept = [*replay.unread, *(value.frame for value in replay.values.values())]
            if list(replay.values) != list(replay.order):
                kept.append(self.frame(use_record(replay.order)))
            if not charge(sum(map(len, kept))) and clears is None:
                return None
            self._replace(kept)
            return replay

    def _replace(self, kept: list[bytes]) -> None:
        temporary = self.path.with_name(self.path.name + _TEMPORARY)  # one for all servers: the lock is held
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            for frame in kept:
                _write(file, frame)
            os.fsync(file)
        finally:
            os.close(file)
        temporary.replace(self.path)

    def _replay(self, content: bytes) -> Replay:
        replay, num_whole = Replay(), 0
        for frame in frames(content, self._identity):
            num_whole += frame.end - frame.start
            self._take(frame, content[frame.start : frame.end], replay)
        if num_whole < len(content):
            logger.warning("%d bytes of %s are damaged and skipped", len(content) - num_whole, self.path)
            replay.has_gaps = True
        return replay

    def _take(self, frame: Frame, whole: bytes, replay: Replay) -> None:
        """What was sealed with another key, or not sealed although there is a key, stays as it is."""
        record: bytes | None = None
        if self._cipher is None and frame.form == PLAIN:
            record = frame.data
        elif self._cipher is not None and frame.form == SEALED:
            record = self._cipher.open(frame.data, self._identity)
        if record is None:
            replay.unread.append(whole)
        else:
            replay.take(record, whole)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, which no other server changes in this block."""
        while True:
            file = self._opened()
            try:
                _lock(file)
                if _is_at(file, self.path):  # else another server has just put a compacted one in its place
                    yield file
                    return
            finally:
                os.close(file)

    def _opened(self) -> int:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path, flags, 0o600)


def clear_journals(folder: Path, salts: str, cipher: Cipher | None) -> None:
    """Remove what all journals in the folder keep of salts that begin with `salts`. Servers may run.

    With an empty text, nothing is left, of other keys and versions neither. Raises OSError.
    """
    if not salts:
        for path in journal_files(folder):
            path.unlink(missing_ok=True)
        return
    for name in names_in(folder):
        JournalFile(folder, name, max_bytes=sys.maxsize, cipher=cipher).compact(lambda _: True, clears=salts)


def names_in(folder: Path) -> list[str]:
    """The names of all journals in the folder that can be read here."""
    return [file.name.removesuffix(_SUFFIX) for file in journal_files(folder) if file.name.endswith(_SUFFIX)]


def _lock(file: int) -> None:
    until_s = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_LOOK_S)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _read(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    parts = iter(lambda: os.read(file, 1 << 24), b"")
    return b"".join(parts)


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
