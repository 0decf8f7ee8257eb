"""A folder of records: files with numbers, and a database whose rows describe them. It knows no tree.

A process owns the folder while it has its database open. A file is written before its row is committed, and removed
after it, so a process that is killed leaves at most files without a row, which the next start removes. Nothing is
forced to the disk, so a loss of power may damage files; their checksums show it when they are read.
"""

import contextlib
import errno
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sqlite3 import Connection

from ..core.errors import setting
from . import files
from .database import NAME, Database, reading
from .faults import Damaged, FolderUnusable, NoRoom, usable
from .place import RECORDS, record_files
from .record import Header, Record, Row, TensorData, name_of, record_of, row_of

logger = logging.getLogger(__name__)

_DAY_S = 24 * 3600
_ROWS = "SELECT id, about, words, used, checksum FROM record"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderUsage:
    used_bytes: int  # all files, the database included
    written_bytes: int  # today
    free_bytes: int  # the volume's
    excess_bytes: int  # to be removed, so that the cap and the floor of free space are kept
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
        self._models: dict[str, str] = {}  # the names of the checkpoints that run, by fingerprint
        self._sizes: dict[str, int] = {}  # bytes of the files that are there or being written, by name
        self.damages: dict[Path, str] = {}  # the faults of records that were found damaged
        self.database = Database(root)
        self.database.open()

    def path_of(self, record: Record) -> Path:
        return path_of(self.root, record.name)

    def note_model(self, fingerprint: str, model: str) -> None:
        """Name a checkpoint that runs. `scan` keeps the name, and removes the records of its other versions."""
        self._models[fingerprint] = model

    def scan(self) -> list[Record]:
        """Read all rows, parents before children. Called at the start, before a record is added.

        It removes files without a row, and rows that are damaged, whose file is missing or of another size, which
        another version of this checkpoint wrote, or that continue one of these.
        """
        with usable(self.root):
            sizes = dict(record_files(self.root))
        rows = self.database.run(lambda c: c.execute(_ROWS).fetchall())
        intact, reasons = listed(rows, sizes)
        for name, reason in reasons.items():
            self._note_damage(path_of(self.root, name), reason)
        found = self._kept(intact)
        lost = {name_of(row_id) for row_id, *_ in rows} - found.keys()
        # A folder that cannot be written can still be read. The next start removes these rows.
        with contextlib.suppress(NoRoom, FolderUnusable):
            self.database.run(self._tidy, lost)
        with usable(self.root):
            self._sizes = {name: record.file_bytes for name, record in found.items()}
            for name in sizes.keys() - found.keys():
                path_of(self.root, name).unlink(missing_ok=True)
        return list(found.values())

    def _tidy(self, connection: Connection, lost: Iterable[str]) -> None:
        _delete(connection, lost)
        connection.executemany("INSERT OR REPLACE INTO model VALUES (?, ?)", self._models.items())

    def _kept(self, records: Iterable[Record]) -> dict[str, Record]:
        """Return the records that can be used, by name, parents before children."""
        kept: dict[str, Record] = {}
        now, num_orphans = self._clock(), 0
        for record in sorted(records, key=lambda record: record.header.start):
            parent = kept.get(record.header.parent)
            if self._is_outdated(record.header.fingerprint):
                continue
            if record.header.continues(None if parent is None else parent.header):
                kept[record.name] = replace(record, used_s=min(record.used_s, now))  # the clock may have been put back
            else:
                num_orphans += 1
        if num_orphans:
            logger.warning(
                "Removed %d records from the cache on disk, because the records before them are gone.", num_orphans
            )
        return kept

    def _is_outdated(self, fingerprint: str) -> bool:
        """Return whether another version of the software computed it for one that runs: the last part differs."""
        running = {one.rpartition("-")[0] for one in self._models} - {""}
        return fingerprint not in self._models and fingerprint.rpartition("-")[0] in running

    def add(self, header: Header, tensors: Sequence[TensorData]) -> Record:
        """Write a record. Raises NoRoom; and Damaged if the one that it continues is gone."""
        row_id, size = secrets.randbits(63), files.size_of(tensors)
        name = name_of(row_id)
        self._make_folders()
        self._reserve(name, size)
        path, day = path_of(self.root, name), self._day
        with usable(self.root), contextlib.ExitStack() as undone:
            undone.callback(self._forget, name)
            written = files.write(path, tensors)
            record = Record(name=name, header=header, tensors=written, file_bytes=size, used_s=self._clock())
            self.database.charge(day, size)
            self.database.run(_insert, record)
            undone.pop_all()
        return record

    def _forget(self, name: str) -> None:
        self._sizes.pop(name, None)
        path_of(self.root, name).unlink(missing_ok=True)

    def read_into(self, record: Record, index: int, buffer: memoryview) -> None:
        """Read one tensor into a buffer of its size, and check it. Raises Damaged, and has removed the record then."""
        try:
            with usable(self.root):
                files.read_tensor(self.path_of(record), record.tensors[index], buffer)
        except Damaged as error:
            with usable(self.root):
                self.root.stat()  # if the folder is gone, the record is not damaged
            error.name = record.name
            if record.name in self._sizes:  # else this server has removed it since the read was planned
                self._note_damage(self.path_of(record), str(error))
                self.remove([record])
            raise

    def _note_damage(self, path: Path, reason: str) -> None:
        self.damages[path] = reason
        logger.warning("Removed a damaged record from the cache on disk: %s (%s).", path, reason)

    def remove(self, records: Iterable[Record]) -> None:
        """Remove records; one may be gone already. A full disk does not hinder it."""
        names = [record.name for record in records]
        with usable(self.root):
            try:
                with contextlib.suppress(NoRoom):  # the next start removes rows without a file
                    self.database.run(_delete, names)
            finally:
                for name in names:
                    self._forget(name)

    def note_use(self, records: Iterable[Record], now_s: float) -> None:
        """Note that the records were used now."""
        uses = [(now_s, int(record.name, 16)) for record in records]
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
        """Count bytes that are written to the database. Returns False if nothing may be written on any day.

        They are few, and grow at the cost of records: they are written also if the folder is full or the day is spent.
        """
        if self._daily_bytes:
            self.database.charge(self._day, num_bytes)
        return self._daily_bytes > 0

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
        return sum(list(self._sizes.values())) + self.database.size()  # a copy, as other threads change it

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
        self._sizes[name] = size


def _insert(connection: Connection, record: Record) -> None:
    parent = record.header.parent
    if parent and not connection.execute("SELECT 1 FROM record WHERE id = ?", (int(parent, 16),)).fetchall():
        raise Damaged("what it continues is gone")
    connection.execute("INSERT INTO record VALUES (?, ?, ?, ?, ?)", row_of(record))


def _delete(connection: Connection, names: Iterable[str]) -> None:
    connection.executemany("DELETE FROM record WHERE id = ?", [(int(name, 16),) for name in names])


def listed(rows: Iterable[Row], sizes: dict[str, int]) -> tuple[list[Record], dict[str, str]]:
    """Return the records whose files have the right size, and the faults of the others by name."""
    intact, reasons = [], {}
    for row in rows:
        name = name_of(row[0])
        try:
            record = record_of(row)
            if sizes.get(name) != record.file_bytes:
                raise Damaged("its file is missing" if name not in sizes else "its file has another size")
            intact.append(record)
        except Damaged as error:
            reasons[name] = str(error)
    return intact, reasons


def verify(root: Path, folder: Folder | None) -> tuple[int, int, dict[Path, str]]:
    """Read every byte. Damaged records are removed if `folder` is given, which this process then owns.

    Returns the numbers of records and bytes that were read, and the faults by file.
    """
    found = look(root)
    faults, damaged = dict(found.reasons), []
    for record in found.records:
        try:
            with usable(root):
                for tensor in record.tensors:
                    files.read_tensor(path_of(root, record.name), tensor, memoryview(bytearray(tensor.nbytes)))
        except Damaged as error:
            faults[record.name] = str(error)
            damaged.append(record)
    left = look(root)  # the owner may have removed records meanwhile
    names = left.reasons.keys() | {record.name for record in left.records}
    if folder is not None:
        folder.scan()
        folder.remove(damaged)
    num_bytes = sum(record.file_bytes for record in found.records)
    return len(found.records), num_bytes, {path_of(root, name): faults[name] for name in faults.keys() & names}


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a folder."""

    records: list[Record]
    reasons: dict[str, str]  # the faults of damaged records, by name
    models: dict[str, str]  # names by fingerprint


def look(root: Path) -> Listing:
    """Read the database without changing it, even while its owner uses it. Raises FolderUnusable."""
    with usable(root):
        if not (root / NAME).exists():
            return Listing([], {}, {})
        with contextlib.closing(reading(root / NAME)) as connection:
            rows = connection.execute(_ROWS).fetchall()
            records, reasons = listed(rows, dict(record_files(root)))
            left = {name_of(row_id) for (row_id,) in connection.execute("SELECT id FROM record")}
            models = dict(connection.execute("SELECT fingerprint, name FROM model"))
    # the owner may have removed some meanwhile
    return Listing(records, {name: reason for name, reason in reasons.items() if name in left}, models)
