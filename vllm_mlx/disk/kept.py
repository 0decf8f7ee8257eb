"""Values that a server remembers in addition to cached state, as rows of a SQLite table. It knows no conversation.

Values are kept by name, for each kind and scope. A process that is killed loses only uncommitted values. SQLite
notices no flipped bit in a value, so each row has a checksum; a row that is damaged is removed.
"""

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from xxhash import xxh3_64

from ..util.fence import Fence
from ..util.tasks import do_nothing
from .database import KEPT_VERSION, Database, clear_kept
from .faults import FolderUnusable, NoRoom
from .folder import Folder

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # a kind takes at most this,
_CAP_SHARE = 32  # and at most 1/32 of the tier's cap
MAX_WAITING_BYTES = 32 << 20  # in memory, of values that are not written yet
_VALUE_SHARE = 4  # a value takes at most a quarter of its kind's bytes
_DELAY_S = 0.05  # values are written after the work that made them, several together
_RETRY_S = 30.0  # after a write that failed
_CLOSE_S = 10.0
_RESTORE_S = 10.0  # the longest wait for values that are read; a disk that hangs gives them later or never
_NO_JSON = (ValueError, TypeError, OverflowError, RecursionError)
_PLACE = "kind = ? AND scope = ?"
# Finds the rows of each kind beyond a number of bytes, counted from the row that was used last.
_EXCESS = """
SELECT rowid, kind, scope, name FROM (
    SELECT rowid, kind, scope, name, sum(bytes) OVER (PARTITION BY kind ORDER BY used DESC, rowid) AS total FROM kept
) WHERE total > ?
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that is kept. It counts as used whenever a value is used whose `base` it is."""

    name: str
    salt: str
    base: str | None
    body: bytes
    used: int  # its place in the order of the last uses

    def value(self) -> Any:
        """Raise ValueError if it is not JSON."""
        return json.loads(_text(self.body))


@dataclass(frozen=True, slots=True)
class _Change:
    """Work on the table that is not done yet."""

    work: Callable[[sqlite3.Connection], object]
    num_bytes: int = 0  # in memory
    tried: Callable[[], object] = do_nothing  # called after each attempt


class Journal:
    """Values of one kind and scope by name, each with a salt. Threads may share it; only `wait` waits for the disk."""

    def __init__(self, journals: "Journals", kind: str, scope: str):
        self._journals, self._place = journals, (kind, scope)
        self._salts: dict[str, str] = {}  # by name, for values that are kept or will be
        self._forgotten: tuple[str, ...] = ()
        self._is_restored = threading.Event()
        self._wait_until_s = 0.0

    def __contains__(self, name: str) -> bool:
        """Return whether a value is kept, or will be."""
        return name in self._salts

    def __len__(self) -> int:
        return len(self._salts)

    def restore(self, take: Callable[[list[Kept]], None]) -> None:
        """Read the values on another thread, and give them to `take` in the order in which they were put.

        Called once, before anything is put.

        If they cannot be read, `take` gets nothing, and later the values.
        """
        self._wait_until_s = time.monotonic() + self._journals.max_wait_s
        rows: list[tuple[Any, ...]] = []
        change = _Change(partial(self._read, rows), tried=partial(self._take, take, rows))
        if not self._journals.add(change):
            self._is_restored.set()

    def wait(self) -> None:
        """Return once the values have been restored, could not be, or have taken too long: then they come later."""
        self._is_restored.wait(max(0.0, self._wait_until_s - time.monotonic()))

    def put(self, name: str, salt: str, value: Callable[[], Any], *, num_bytes: int, base: str | None = None) -> None:
        """Keep a value, which replaces one of the same name. `value` gives it as JSON, later and on another thread.

        `num_bytes` is its size in memory until then. `base` names a value that counts as used whenever this one does.
        If too much waits to be written, neither the value nor an earlier one is kept.
        """
        with self._journals.turn:
            if self._journals.add(_Change(partial(self._put, name, salt, base, value), max(1, num_bytes))):
                self._salts[name] = salt
            else:
                self.drop([name])  # its earlier value is no longer true

    def drop(self, names: Iterable[str]) -> None:
        names = list(names)
        with self._journals.turn:
            for name in names:
                self._salts.pop(name, None)
            if names:
                self._journals.add(_Change(partial(self._drop, names)))

    def use(self, names: Iterable[str]) -> None:
        """Count values as used, one after the other, and after each its bases."""
        known = [name for name in names if name in self._salts]
        if known:
            self._journals.add(_Change(partial(self._use, known)))

    def forget(self, salts: str) -> None:
        """Forget the values of salts that begin with `salts`."""
        with self._journals.turn:
            self._salts = {name: salt for name, salt in self._salts.items() if not salt.startswith(salts)}
            self._forgotten += (salts,)

    # -- on the thread of the journals

    def _take(self, take: Callable[[list[Kept]], None], rows: list[tuple[Any, ...]]) -> None:
        try:
            values = [Kept(name, _text(salt), *rest) for name, salt, *rest in rows]
            with self._journals.turn:
                values = [kept for kept in values if not kept.salt.startswith(self._forgotten)]
                self._salts = {**{kept.name: kept.salt for kept in values}, **self._salts}
            take(values)
        finally:
            self._is_restored.set()

    def _read(self, rows: list[tuple[Any, ...]], connection: sqlite3.Connection) -> None:
        """Read the rows that are intact. The others are removed."""
        damaged = []
        rows.clear()
        columns = "rowid, name, salt, base, value, put, used, checksum"
        for rowid, *row, put, used, checksum in connection.execute(
            f"SELECT {columns} FROM kept WHERE {_PLACE} ORDER BY put", self._place
        ):
            if checksum == _checksum(*self._place, *row, put) and isinstance(used, int):
                rows.append((*row, used))
            else:
                damaged.append((rowid,))
        if damaged:
            logger.warning("%d remembered values on disk were damaged and are removed.", len(damaged))
            connection.executemany("DELETE FROM kept WHERE rowid = ?", damaged)

    def _put(
        self, name: str, salt: str, base: str | None, value: Callable[[], Any], connection: sqlite3.Connection
    ) -> None:
        try:
            body = _bytes(json.dumps(value(), ensure_ascii=False, separators=(",", ":")))
        except _NO_JSON:
            logger.exception("A value is not kept")
            body = None
        most = self._journals.max_bytes // _VALUE_SHARE
        if body is None or len(body) > most or not self._journals.charge(len(body)):
            self._drop([name], connection)  # its earlier value too
            with self._journals.turn:
                self._salts.pop(name, None)
            return
        [put] = connection.execute("SELECT coalesce(max(put), 0) + 1 FROM kept").fetchone()
        row = (*self._place, name, _bytes(salt), base, body)
        connection.execute(
            "INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?, ?)",
            (*row[:-1], len(body), put, _checksum(*row, put), body),
        )
        self._use([name], connection)

    def _drop(self, names: list[str], connection: sqlite3.Connection) -> None:
        rows = [(*self._place, name) for name in names]
        connection.executemany(f"DELETE FROM kept WHERE {_PLACE} AND name = ?", rows)

    def _use(self, names: list[str], connection: sqlite3.Connection) -> None:
        [used] = connection.execute("SELECT coalesce(max(used), 0) FROM kept").fetchone()
        for first in names:
            seen: set[str] = set()
            name: str | None = first
            while name is not None and name not in seen:
                seen.add(name)
                used += 1
                row = (*self._place, name)
                connection.execute(f"UPDATE kept SET used = ? WHERE {_PLACE} AND name = ?", (used, *row))
                found = connection.execute(f"SELECT base FROM kept WHERE {_PLACE} AND name = ?", row).fetchone()
                name = found and found[0]


class Journals:
    """The kept values of one folder, and the thread that reads and writes them. Any thread may use it."""

    def __init__(
        self,
        database: Database,
        *,
        charge: Callable[[int], bool] = lambda num_bytes: True,
        max_bytes: int = MAX_BYTES,
        max_wait_s: float = _RESTORE_S,
    ):
        """`charge` counts bytes that are written; a value whose bytes it refuses is not kept.

        A kind has at most `max_bytes`. The database is closed with the thread, and nowhere else while a server runs.
        """
        self.charge, self.max_bytes, self.max_wait_s = charge, max_bytes, max_wait_s
        self._database = database
        self.turn = threading.Condition()  # changes, and the names that they keep, have one order
        self._waiting: list[_Change] = []
        self._due_s = 0.0  # by the monotonic clock
        self._opened: dict[tuple[str, str], Journal] = {}  # by kind and scope
        self._is_closed = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="journals", daemon=True)
        self._thread.start()

    def open(self, kind: str, fingerprint: str = "") -> Journal:
        """Return the values of one kind, and of one checkpoint unless they belong to all. There is one such journal."""
        place = (f"{kind}.{KEPT_VERSION}", fingerprint)
        return self._opened.setdefault(place, Journal(self, *place))

    def clear(self, salts: str, kind: str) -> None:
        """Drop the values of all salts that begin with `salts`, of one kind and of every checkpoint.

        Nothing of them stays in the files.
        """
        shorten = partial(self._done, self._database.shorten)
        with self.turn:
            for (other, _), journal in self._opened.items():
                if other == f"{kind}.{KEPT_VERSION}":
                    journal.forget(salts)
            self.add(_Change(partial(clear_kept, salts=salts, kind=kind), tried=shorten))

    def add(self, change: _Change, *, is_due: bool = False) -> bool:
        """Add a change. Returns False if too much waits already, or after the end."""
        with self.turn:
            num_waiting = sum(other.num_bytes for other in self._waiting)
            is_full = num_waiting and num_waiting + change.num_bytes > MAX_WAITING_BYTES
            if self._is_closed or (change.num_bytes and is_full):
                return False
            if is_due or not self._waiting:
                self._due_s = time.monotonic() + (0.0 if is_due else _DELAY_S)
            self._waiting.append(change)
            self.turn.notify_all()
            return True

    def flush(self, timeout_s: float = _CLOSE_S) -> bool:
        """Write waiting values. Returns whether that succeeded."""
        tried = threading.Event()
        self.add(_Change(do_nothing, tried=tried.set), is_due=True)
        return tried.wait(timeout_s) and not self._has_failed

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write waiting values, once more if that failed before, and end the thread."""
        with self.turn:
            self._is_closed = True
            self.turn.notify_all()
        self._thread.join(timeout_s)

    # -- on the thread

    def _run(self) -> None:
        while changes := self._due():
            with Fence("the remembered values, which go on with what is next"):
                self._write(changes)
        self._database.close()

    def _due(self) -> list[_Change]:
        """Wait for changes that are due. Returns none at the end."""
        with self.turn:
            while not self._is_closed and (not self._waiting or self._due_s > time.monotonic()):
                self.turn.wait(max(0.0, self._due_s - time.monotonic()) if self._waiting else None)
            due, self._waiting = self._waiting, []
            return due

    def _write(self, changes: list[_Change]) -> None:
        """Make changes in one transaction. Changes that fail are tried again later, except at the end."""

        def write(connection: sqlite3.Connection) -> None:
            for change in changes:
                change.work(connection)
            self._shrink(connection)

        try:
            is_done = self._done(partial(self._database.run, write))
            with self.turn:
                if not is_done and not self._is_closed:
                    self._waiting = changes + self._waiting
                    self._due_s = time.monotonic() + _RETRY_S
        finally:
            for change in changes:
                change.tried()

    def _done(self, work: Callable[[], object]) -> bool:
        """Do work on the database. Returns False if it cannot be used now; the log has one line of it."""
        try:
            work()
        except (FolderUnusable, NoRoom) as error:
            if not self._has_failed:
                logger.warning("Remembered values cannot be read or written now, and are tried again: %s", error)
            self._has_failed = True
            return False
        self._has_failed = False
        return True

    def _shrink(self, connection: sqlite3.Connection) -> None:
        """Remove the least recently used values of each kind that exceeds its limit."""
        excess = connection.execute(_EXCESS, (self.max_bytes,)).fetchall()
        connection.executemany("DELETE FROM kept WHERE rowid = ?", [(rowid,) for rowid, *_ in excess])
        for _, kind, scope, name in excess:
            if (journal := self._opened.get((kind, scope))) is not None:
                journal.drop([name])  # so that no new value names it as its base


class Memories:
    """The memory of one server, so that its next prompts continue those of the process before it.

    A missing journal means that its values end with the process.
    """

    def __init__(self, journals: Journals | None = None, fingerprint: str = ""):
        """`fingerprint` is the checkpoint's."""
        self.journals = journals
        self.replies = None if journals is None else journals.open("replies", fingerprint)
        self.responses = None if journals is None else journals.open("responses")

    @classmethod
    def at(cls, folder: Folder, fingerprint: str, *, cap_bytes: int) -> Self:
        """`folder` and `cap_bytes` are the disk tier's."""
        max_bytes = min(MAX_BYTES, cap_bytes // _CAP_SHARE)
        return cls(Journals(folder.database, charge=folder.charge, max_bytes=max_bytes), fingerprint)

    def of(self, fingerprint: str) -> Self:
        """Return the memory of another checkpoint, in the same folder and with the same responses."""
        return type(self)(self.journals, fingerprint)

    def clear(self, salts: str = "") -> None:
        """Drop the values of salts that begin with `salts`, for every checkpoint of the folder.

        Stored responses stay: clients delete them.
        """
        if self.journals is not None:
            self.journals.clear(salts, "replies")

    def close(self) -> None:
        """Write waiting values, and free the folder for another process."""
        if self.journals is not None:
            self.journals.close()


NO_MEMORIES = Memories()


def _checksum(*fields: object) -> bytes:
    return xxh3_64(repr(fields).encode()).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
