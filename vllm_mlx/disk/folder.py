"""A folder of records: files with numbers, and a database whose rows say what they are. It knows no tree.

A process owns the folder while it has its database open. A file is written before its row is committed, and removed
after it, so a process that is killed leaves at most files without a row, which the next start removes. Nothing is
forced to the disk, so a loss of power may damage files; their checksums show it when they are read.
"""

import contextlib
import errno
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from sqlite3 import Connection

from ..core.errors import setting
from . import files
from .database import NAME, Database, reading
from .faults import Damaged, FolderUnusable, NoRoom, usable
from .place import RECORDS, record_files, remove_old
from .record import Header, Record, Row, TensorData, name_of, record_of, row_of

logger = logging.getLogger(__name__)

_DAY_S = 24 * 3600
_AHEAD_S = 3600.0  # a last use that lies further in the future shows that the clock was put back
_ROWS = "SELECT id, about, words, used, checksum FROM record"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderUsage:
    used_bytes: int  # all files, the database included
    written_bytes: int  # today
    free_bytes: int  # the volume's
    excess_bytes: int  # must be removed to keep the cap and the floor of free space
    num_records: int


def path_of(root: Path, name: str) -> Path:
    return root / RECORDS / f"{name}.kv"


class Folder:
    """All methods may be called from any thread, and raise FolderUnusable if they cannot do their work."""

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int,
        daily_bytes: int,
        floor_bytes: int,
        clock: Callable[[], float] = time.time,
    ):
        """Own the folder, which is made if only it is missing. `floor_bytes` of the volume stay free."""
        self.root = root
        self._max_bytes, self._daily_bytes, self._floor_bytes = max_bytes, daily_bytes, floor_bytes
        self._clock = clock
        self._model = ("", "")  # the checkpoint that runs: its fingerprint and its name
        self._lock = threading.Lock()  # guards the sizes
        self._sizes: dict[str, int] = {}  # bytes of the files that are there or being written, by name
        self.damages: dict[Path, str] = {}  # what was found damaged, and why
        self.database = Database(root)
        self.database.open()

    def path_of(self, record: Record) -> Path:
        return path_of(self.root, record.name)

    def note_model(self, fingerprint: str, model: str) -> None:
        """Name the checkpoint that runs. `scan` keeps the name, and removes what other versions of it have written."""
        self._model = fingerprint, model

    def models(self) -> dict[str, str]:
        """Names of models by fingerprint."""
        return self.database.run(lambda c: dict(c.execute("SELECT fingerprint, name FROM model")))

    def scan(self) -> Iterator[Record]:
        """Read all rows, parents before children. Called at the start, before anything is added.

        It removes files without a row, and rows that are damaged, whose file is missing or of another size, which
        another version of this checkpoint wrote, or that continue one of these.
        """
        with usable(self.root):
            remove_old(self.root)
            sizes = dict(record_files(self.root))
        found, lost = self._sorted_out(self.database.run(lambda c: c.execute(_ROWS).fetchall()), sizes)
        # What cannot be written can be read, and the next start removes these rows.
        with contextlib.suppress(NoRoom, FolderUnusable):
            self.database.run(partial(self._tidy, lost))
        with usable(self.root), self._lock:
            self._sizes = {record.name: record.file_bytes for record in found}
            for name in sizes.keys() - self._sizes.keys():
                path_of(self.root, name).unlink(missing_ok=True)
        yield from found

    def _tidy(self, lost: list[tuple[int]], connection: Connection) -> None:
        connection.executemany("DELETE FROM record WHERE id = ?", lost)
        if self._model[0]:
            connection.execute("INSERT OR REPLACE INTO model VALUES (?, ?)", self._model)

    def _sorted_out(self, rows: list[Row], sizes: dict[str, int]) -> tuple[list[Record], list[tuple[int]]]:
        """The records that are of use, and the ids of the others."""
        intact, lost, reasons = listed(rows, sizes)
        for name, reason in reasons.items():
            self._note_damage(path_of(self.root, name), reason)
        kept: dict[str, Record] = {}
        now, num_ahead, num_orphans = self._clock(), 0, 0
        for record in sorted(intact, key=lambda record: record.header.start):
            is_outdated = self._is_outdated(record.header.fingerprint)
            if not is_outdated and continues(record, kept):
                num_ahead += record.used_s > now + _AHEAD_S
                kept[record.name] = replace(record, used_s=min(record.used_s, now))
            else:
                num_orphans += not is_outdated
                lost.append((int(record.name, 16),))
        if num_orphans:
            logger.warning(
                "Removed %d records from the cache on disk, because what they continue is gone.", num_orphans
            )
        if num_ahead:
            logger.warning(
                "The times of %d records of the cache on disk lie in the future, so the clock was put back. They count "
                "as used now.", num_ahead,
            )  # fmt: skip
        return list(kept.values()), lost

    def _is_outdated(self, fingerprint: str) -> bool:
        """Whether it is this checkpoint's, but of another version of what computes it: the last part differs."""
        mine = self._model[0].rpartition("-")[0]
        return bool(mine) and fingerprint != self._model[0] and fingerprint.rpartition("-")[0] == mine

    def add(self, header: Header, tensors: Sequence[TensorData]) -> Record:
        """Write a record. Raises NoRoom; and Damaged if the one that it continues is gone."""
        row_id, size = secrets.randbits(63), files.size_of(tensors)
        name = name_of(row_id)
        self._make_folders()
        self._reserve(name, size)
        path, day = path_of(self.root, name), self._day
        try:
            with usable(self.root):
                written = files.write(path, tensors)
            record = Record(name=name, header=header, tensors=written, file_bytes=size, used_s=self._clock())
            self.database.charge(day, size)
            self.database.run(partial(_insert, record))
        except BaseException:
            with self._lock:
                del self._sizes[name]
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return record

    def read_into(self, record: Record, index: int, buffer: memoryview) -> None:
        """Read one tensor into a buffer of its size, and check it. Raises Damaged, and has removed the record then."""
        try:
            with usable(self.root):
                files.read_tensor(self.path_of(record), record.tensors[index], buffer)
        except Damaged as error:
            if not self.root.is_dir():
                with usable(self.root):
                    raise FileNotFoundError from error
            self.lose(record, str(error))
            raise

    def lose(self, record: Record, reason: str) -> None:
        """Remove a record that was found damaged."""
        self._note_damage(self.path_of(record), reason)
        self.remove([record])

    def _note_damage(self, path: Path, reason: str) -> None:
        self.damages[path] = reason
        logger.warning("Removed a damaged record from the cache on disk: %s (%s).", path, reason)

    def remove(self, records: Iterable[Record]) -> None:
        """Remove records; that one is gone already is no error. A full disk does not hinder it."""
        records = list(records)
        ids = [(int(record.name, 16),) for record in records]
        try:
            with contextlib.suppress(NoRoom):  # the next start removes rows without a file
                self.database.run(lambda c: c.executemany("DELETE FROM record WHERE id = ?", ids))
        finally:
            with usable(self.root), self._lock:
                for record in records:
                    self.path_of(record).unlink(missing_ok=True)
                    self._sizes.pop(record.name, None)

    def note_use(self, records: Iterable[Record], now_s: float) -> None:
        """The records were used now."""
        uses = [(now_s, int(record.name, 16)) for record in records]
        with contextlib.suppress(NoRoom):
            self.database.run(lambda c: c.executemany("UPDATE record SET used = ? WHERE id = ?", uses))

    def usage(self) -> FolderUsage:
        with usable(self.root):
            free_bytes, used_bytes = shutil.disk_usage(self.root).free, self._used_bytes()
        excess_bytes = max(0, used_bytes - self._max_bytes, self._floor_bytes - free_bytes)
        return FolderUsage(
            used_bytes=used_bytes,
            written_bytes=self.database.written.get(self._day, 0),
            free_bytes=free_bytes,
            excess_bytes=min(used_bytes, excess_bytes),
            num_records=len(self._sizes),
        )

    def charge(self, num_bytes: int) -> bool:
        """Count bytes that are about to be written to the database. Returns False if they may not be written.

        They are few, and grow at the cost of records: a full folder does not keep them from being written.
        """
        usage = self.usage()
        if usage.written_bytes + num_bytes > self._daily_bytes or usage.free_bytes - num_bytes < self._floor_bytes:
            return False
        self.database.charge(self._day, num_bytes)
        return True

    def shorten(self) -> None:
        """Leave nothing of what was removed in the database's log."""
        self.database.shorten()

    def close(self) -> None:
        """Another process may own the folder afterwards."""
        self.database.close()

    @property
    def _day(self) -> int:
        return int(self._clock() // _DAY_S)

    def _make_folders(self) -> None:
        """Make the folders that are missing. Those above are not made: a disk may have been unplugged."""
        with usable(self.root):
            for folder in (self.root, self.root / RECORDS):
                if not folder.is_dir():
                    folder.mkdir(mode=0o700)
            if (self.root / RECORDS).is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "it is a link", self.root / RECORDS)

    def _used_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values()) + self.database.size()

    def _reserve(self, name: str, size: int) -> None:
        """Count a file before it is written. Raises NoRoom."""
        usage = self.usage()
        if usage.used_bytes + size > self._max_bytes:
            raise NoRoom(
                "cap", f"The cache on disk has {usage.used_bytes} of {self._max_bytes} bytes, and {size} more do not "
                f"fit. {setting('cache_disk')} sets its size.",
            )  # fmt: skip
        if usage.written_bytes + size > self._daily_bytes:
            raise NoRoom(
                "daily", f"Today's {self._daily_bytes} bytes of writing to the cache on disk are used. It goes on "
                f"tomorrow (UTC); {setting('cache_disk_daily')} sets how much may be written in a day.",
            )  # fmt: skip
        if usage.free_bytes - size < self._floor_bytes:
            raise NoRoom(
                "free", f"Nothing is written to the cache on disk while the volume of {self.root} has only "
                f"{usage.free_bytes} bytes free: {self._floor_bytes} are left to other programs. Remove files, or "
                f"choose another folder with {setting('cache_dir')}.",
            )  # fmt: skip
        with self._lock:
            self._sizes[name] = size


def _insert(record: Record, connection: Connection) -> None:
    parent = record.header.parent
    if parent and not connection.execute("SELECT 1 FROM record WHERE id = ?", (int(parent, 16),)).fetchall():
        raise Damaged("what it continues is gone")
    connection.execute("INSERT INTO record VALUES (?, ?, ?, ?, ?)", row_of(record))


def listed(rows: Iterable[Row], sizes: dict[str, int]) -> tuple[list[Record], list[tuple[int]], dict[str, str]]:
    """The records of rows whose files have the right size; the ids of the other rows; and what is wrong, by name."""
    intact, lost, reasons = [], [], {}
    for row in rows:
        name = name_of(row[0])
        try:
            record = record_of(row)
            if sizes.get(name) != record.file_bytes:
                raise Damaged("its file is missing" if name not in sizes else "its file has another size")
            intact.append(record)
        except Damaged as error:
            reasons[name] = str(error)
            lost.append((row[0],))
    return intact, lost, reasons


def continues(record: Record, known: dict[str, Record]) -> bool:
    """Whether the record's parent is known, and reaches to where the record begins."""
    if not record.header.parent:
        return True
    parent = known.get(record.header.parent)
    return parent is not None and parent.header.start < record.header.start <= parent.header.end


def verify(root: Path, folder: Folder | None) -> tuple[int, int, dict[Path, str]]:
    """Read every byte, and remove what is damaged if the folder is given, which this process owns then.

    Returns the numbers of records and bytes that were read, and what is wrong, by file.
    """
    if folder is not None:
        records = list(folder.scan())
        faults = dict(folder.damages)
    else:
        found = look(root)
        records = found.records
        faults = {path_of(root, name): reason for name, reason in found.reasons.items()}
    for record in records:
        path = path_of(root, record.name)
        try:
            with usable(root):
                files.verify(path, record)
        except Damaged as error:
            faults[path] = str(error)
            if folder is not None:
                folder.lose(record, str(error))
    if folder is None:  # the owner may have removed records meanwhile
        found = look(root)
        left = {record.name for record in found.records} | found.reasons.keys()
        faults = {path: fault for path, fault in faults.items() if path.stem in left}
    return len(records), sum(record.file_bytes for record in records), faults


@dataclass(frozen=True, slots=True)
class Listing:
    """What a look at a folder finds."""

    records: list[Record]
    reasons: dict[str, str]  # what is wrong with records, by name
    models: dict[str, str]  # names by fingerprint
    written: dict[int, int]  # bytes by day


def look(root: Path) -> Listing:
    """Read the database beside its owner, if there is one, and change nothing. Raises FolderUnusable."""
    with usable(root):
        if not (root / NAME).exists():
            return Listing([], {}, {}, {})
        with contextlib.closing(reading(root / NAME)) as connection:
            rows = connection.execute(_ROWS).fetchall()
            records, _, reasons = listed(rows, dict(record_files(root)))
            left = {name_of(row_id) for (row_id,) in connection.execute("SELECT id FROM record")}
            models = dict(connection.execute("SELECT fingerprint, name FROM model"))
            written = dict(connection.execute("SELECT day, bytes FROM day"))
    reasons = {name: reason for name, reason in reasons.items() if name in left}  # not what was removed meanwhile
    return Listing(records, reasons, models, written)
