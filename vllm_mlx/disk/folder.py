"""A folder of records. It knows no tree and no tokens.

Several servers may use one folder at once, and each may remove any record at any moment. A record is written to a
draft, which is then renamed: a reader sees a complete file or none, also if a process is killed. Nothing is forced to
the disk, so a loss of power may leave damaged files; their checksums show it when they are read.

A damaged record is removed, with one line in the log, unless the folder is only looked at. Only files that are named
like records are touched.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from .own_files import SUFFIX, record_files
from .record import Damaged, Header, Record, TensorData, UnknownVersion, checkpoint_folder, name_of
from .record_file import Draft, Source, read_record, read_tensor
from .space import FolderUnusable, Space

logger = logging.getLogger(__name__)

_AHEAD_S = 3600.0  # clocks of servers that share a folder may differ by so much
OTHERS_UNUSED_S = 7 * 24 * 3600  # records that cannot be read here are in use so long after their last use


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderUsage:
    used_bytes: int  # all files, drafts and records that cannot be read here included
    written_bytes: int  # today, by all servers
    free_bytes: int  # the volume's
    excess_bytes: int  # must be removed to keep the cap and the floor of free space
    num_records: int
    num_others: int  # intact records that cannot be read here
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Damage:
    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Changes:
    """What other servers did."""

    added: tuple[Record, ...]  # parents before children
    removed: frozenset[str]  # names


class Folder:
    """All methods may be called from any thread, and raise FolderUnusable if they cannot do their work.

    A record that somebody has removed is a FileNotFoundError, and is met now and then.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int,
        daily_bytes: int,
        floor_bytes: int,
        repairs: bool = True,
        clock: Callable[[], float] = time.time,
    ):
        """`max_bytes` and `daily_bytes` are for all servers together; `floor_bytes` of the volume stay free.

        `repairs`: reading makes a folder that is missing, and removes what is damaged or left behind. Without it, only
        the methods that add and remove change anything.
        """
        self.root, self._repairs = root, repairs
        self._clock = clock
        self._space = Space(root, max_bytes=max_bytes, daily_bytes=daily_bytes, floor_bytes=floor_bytes, clock=clock)
        self.damages: list[Damage] = []  # the files that were found damaged
        self._lock = Lock()  # guards the two below
        self._known: dict[str, Record] = {}  # by name, what was read or written
        self._others: dict[
            Path, tuple[float, int]
        ] = {}  # last use and bytes of intact records that cannot be read here

    def name_of(self, header: Header) -> str:
        return name_of(header)

    def path_of(self, record: Record) -> Path:
        return self._path(record.header, record.name)

    def scan(self) -> Iterator[Record]:
        """Read the headers of all records, parents before children, and remove what is of no use if it repairs."""
        with self._space.usable():
            if self._repairs:
                self._space.ready()
            with self._lock:
                self._known, self._others = {}, {}
            found = self._read(record_files(self.root))
            if self._repairs:
                with contextlib.suppress(OSError):  # The folder may be read only.
                    self._space.clean()
        if self._others and self._repairs:
            logger.warning(
                "The cache on disk, %s, has %d records (%d bytes) of another version of vllm-mlx. They count "
                "towards its size. If it needs room, the ones that nobody has used for %d days are removed.",
                self.root, len(self._others), sum(size for _, size in self._others.values()), OTHERS_UNUSED_S // 86400,
            )  # fmt: skip
        num_orphans = 0
        for record in found:
            if self._continues(record):
                yield record
                continue
            self._forget(record)
            if self._has_unseen_parent(record):  # It was written after the listing: `changes` finds both.
                continue
            if not self._repairs:
                continue
            num_orphans += 1
            with contextlib.suppress(FolderUnusable):
                self.remove(record)
        if num_orphans:
            logger.warning(
                "Removed %d records from the cache on disk, because what they continue is gone.", num_orphans
            )

    def changes(self) -> Changes:
        """What others added and removed since the last look. It costs a listing, and reads new files only."""
        with self._space.usable():
            files = {file.name.removesuffix(SUFFIX): file for file in record_files(self.root)}
            with self._lock:
                removed = frozenset(self._known.keys() - files.keys())
                for name in removed:
                    del self._known[name]
                new = [file for name, file in files.items() if name not in self._known and file not in self._others]
            found = self._read(new)
        added = []
        for record in found:
            if self._continues(record):
                added.append(record)
            else:
                self._forget(record)  # Its parent may be found at the next look.
        return Changes(tuple(added), removed)

    def add(self, header: Header, tensors: Sequence[TensorData]) -> Record:
        """Write a record. One that exists is only returned, with its own layout and numbers.

        Raises NoRoom, and FileNotFoundError if its parent is gone.
        """
        draft = Draft(header, tensors)
        path = self._path(header, draft.name)
        with self._space.usable():
            self._space.ready()
            if (record := self._existing(path)) is not None:
                return record
            if header.parent and not (parent := self._path(header, header.parent)).exists():
                raise FileNotFoundError(errno.ENOENT, "the record that this one continues is gone", str(parent))
            try:
                with self._space.writing(path, draft.file_bytes) as file:
                    record = replace(draft.write(file), used_s=self._clock())
                    os.utime(file, (record.used_s, record.used_s))
            except FileExistsError:
                if (record := self._existing(path)) is None:
                    raise FileNotFoundError(errno.ENOENT, "another server removed it", str(path)) from None
        self._remember(record)
        return record

    def read_into(self, record: Record, index: int, buffer: memoryview) -> None:
        """Read one tensor into a buffer of its size, and check it. Raises Damaged, and has removed the file then."""
        path = self.path_of(record)
        try:
            with self._space.usable(), _opened(path) as (source, _):
                try:
                    read_tensor(source, record, index, buffer)
                except (Damaged, OSError) as error:
                    reason = _damage(error)
                    self._judge(path, source, record, reason)
        except FileNotFoundError:
            self._forget(record)
            raise

    def remove(self, record: Record) -> None:
        """Remove a record; that it is gone already is no error."""
        with self._space.usable():
            self._space.remove(self.path_of(record))
        self._forget(record)

    def clear(self) -> int:
        """Remove all records, also the ones that cannot be read here. Returns the bytes."""
        with self._space.usable():
            freed_bytes = sum(self._space.remove(path) for path in record_files(self.root))
        with self._lock:
            self._known, self._others = {}, {}
        return freed_bytes

    def clean(self) -> None:
        """Remove drafts whose writers are dead, and empty folders, and count the rest again."""
        with self._space.usable():
            self._space.clean()

    def touch(self, record: Record) -> None:
        """Note that the record was used now."""
        now = self._clock()
        try:
            os.utime(self.path_of(record), (now, now))
        except FileNotFoundError:
            self._forget(record)
            raise
        except OSError:
            logger.debug("The time of a record's last use was not noted.", exc_info=True)

    def usage(self) -> FolderUsage:
        with self._space.usable():
            figures = self._space.figures(counts=not self._repairs)
        with self._lock:
            return FolderUsage(
                used_bytes=figures.used_bytes,
                written_bytes=figures.written_bytes,
                free_bytes=figures.free_bytes,
                excess_bytes=figures.excess_bytes,
                num_records=len(self._known),
                num_others=len(self._others),
                other_bytes=sum(size for _, size in self._others.values()),
            )

    def charge(self, num_bytes: int) -> bool:
        """Count bytes that a journal is about to write towards the limits. Returns False if they may not be written."""
        return self._space.charge(num_bytes)

    def remove_others(self, num_bytes: int) -> int:
        """Remove records that cannot be read here and that nobody has used for long, the longest unused first.

        It stops when enough bytes are free. Returns the bytes removed.
        """
        old_s = self._clock() - OTHERS_UNUSED_S
        with self._lock:
            old = sorted((used_s, path) for path, (used_s, _) in self._others.items() if used_s < old_s)
        freed_bytes = 0
        for _, path in old:
            if freed_bytes >= num_bytes:
                break
            with contextlib.suppress(FileNotFoundError), self._space.usable():
                status = path.stat()
                if status.st_mtime >= old_s:  # another server has used it since
                    continue
                self._space.remove(path)
                freed_bytes += status.st_size
            with self._lock:
                self._others.pop(path, None)
        return freed_bytes

    def _read(self, files: Iterable[Path]) -> list[Record]:
        """The records that can be read, parents before children. Damaged ones are removed."""
        records, num_ahead = [], 0
        for path in files:
            try:
                with _opened(path) as (source, used_s):
                    record = read_record(source, path.name.removesuffix(SUFFIX))
                if self.path_of(record) != path:
                    raise Damaged("it lies in the folder of another checkpoint")
            except FileNotFoundError:
                continue
            except (UnknownVersion, PermissionError):
                with self._lock, contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    self._others[path] = status.st_mtime, status.st_size
            except (Damaged, OSError) as error:
                self._discard(path, _damage(error))
            else:
                records.append(replace(record, used_s=min(used_s, self._clock())))
                num_ahead += used_s > self._clock() + _AHEAD_S
                self._remember(record)
        if num_ahead:
            logger.warning(
                "The times of %d records of the cache on disk lie in the future, so the clock was put back. They count "
                "as used now.", num_ahead,
            )  # fmt: skip
        return sorted(records, key=lambda record: record.header.start)

    def _existing(self, path: Path) -> Record | None:
        """The record in a file, if it is there and can be read."""
        records = self._read([path])
        return records[0] if records else None

    def _judge(self, path: Path, source: Source, record: Record, reason: str) -> None:
        """A tensor differs from what the record promises. Remove the file, unless it is a new one of another server."""
        try:
            found = read_record(source, record.name)
        except (Damaged, UnknownVersion, OSError):
            found = record
        if found.digest != record.digest:
            raise FileNotFoundError(errno.ENOENT, "another server has replaced it", str(path))
        self._forget(record)
        self._discard(path, reason)
        raise Damaged(f"{path}: {reason}")

    def _discard(self, path: Path, reason: str) -> None:
        self.damages.append(Damage(path, reason))
        if not self._repairs:
            return
        try:
            self._space.remove(path)
        except OSError as error:
            logger.warning("A damaged record of the cache on disk stays: %s (%s). %s", path, reason, error)
        else:
            logger.warning("Removed a damaged record from the cache on disk: %s (%s).", path, reason)

    def _continues(self, record: Record) -> bool:
        """Whether the record's parent is known, and reaches to where the record begins."""
        if not record.header.parent:
            return True
        with self._lock:
            parent = self._known.get(record.header.parent)
        return parent is not None and parent.header.start < record.header.start <= parent.header.end

    def _has_unseen_parent(self, record: Record) -> bool:
        with self._lock:
            is_known = record.header.parent in self._known
        return not is_known and self._path(record.header, record.header.parent).exists()

    def _path(self, header: Header, name: str) -> Path:
        return self.root / checkpoint_folder(header.fingerprint) / f"{name}{SUFFIX}"

    def _remember(self, record: Record) -> None:
        with self._lock:
            self._known[record.name] = record

    def _forget(self, record: Record) -> None:
        """So that it counts as new if it comes back."""
        with self._lock:
            self._known.pop(record.name, None)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Source, float]]:
    """The file, and the time of its last use."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(file)
        yield Source(file, status.st_size), status.st_mtime
    finally:
        os.close(file)


def _damage(error: Exception) -> str:
    """What is wrong with a file. Other errors of the system than unreadable places are raised again."""
    if isinstance(error, OSError) and error.errno != errno.EIO:
        raise error
    return str(error)
