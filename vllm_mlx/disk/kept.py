"""What a server remembers in addition to keys and values: rows of a SQLite table. It knows no conversation.

Values are kept by name, for each kind and scope. A process that is killed loses at most what was not committed. SQLite
notices no flipped bit in a value, so each row has a checksum; a row that is damaged is removed.
"""

import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from xxhash import xxh3_64

from ..core.fence import Fence
from .database import KEPT_VERSION, Database, clear_kept, kind_of
from .faults import FolderUnusable, NoRoom

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # a kind takes at most so many
MAX_WAITING_BYTES = 32 << 20  # in memory, of values that are not written yet
Charge = Callable[[int], bool]  # bytes that are about to be written -> whether they may be
_VALUE_SHARE = 4  # a value takes at most a quarter of its kind's bytes
_DELAY_S = 0.05  # so that values are written after the work that made them, several at once
_RETRY_S = 30.0  # after a write that failed or was not allowed
_CLOSE_S = 10.0
_NO_JSON = (ValueError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that is kept. It is used whenever one is used whose `base` it is."""

    name: str
    salt: str
    base: str | None
    body: bytes

    def value(self) -> Any:
        """Raises ValueError if it is not JSON."""
        return json.loads(_text(self.body))


@dataclass(frozen=True, slots=True)
class Restored:
    """What a journal keeps."""

    values: list[Kept]  # in the order in which they were put
    order: list[str]  # their names, those first whose last use is longest ago


@dataclass(frozen=True, slots=True)
class _Change:
    """Something that is not written yet."""

    write: Callable[[sqlite3.Connection], None]
    name: str | None = None  # names the value that it keeps
    num_bytes: int = 0  # in memory


class Journal:
    """Values of one kind and scope by name, each with a salt. Threads may share it; only `wait` waits for the disk."""

    def __init__(self, journals: "Journals", kind: str, scope: str):
        self._journals, self._place = journals, (kind, scope)
        self._lock = threading.Lock()
        self._held: dict[str, str] = {}  # salts by name
        self._is_restored = threading.Event()

    def __contains__(self, name: str) -> bool:
        """Whether a value is kept, or will be."""
        return name in self._held

    def restore(self, take: Callable[[Restored], None]) -> None:
        """Read the values on another thread, and give them to `take`. Called once, before anything is put."""
        if not self._journals.soon(partial(self._restore, take)):
            self._is_restored.set()

    def wait(self) -> None:
        """Return once what is kept has been restored."""
        self._is_restored.wait()

    def put(self, name: str, salt: str, value: Callable[[], Any], *, num_bytes: int, base: str | None = None) -> None:
        """Keep a value, in place of one with the same name. `value` gives it as JSON, later and on another thread.

        `num_bytes`: what it holds in memory until then. `base`: a value that counts as used whenever this one does.
        It is not kept if too much waits to be written.
        """
        with self._lock:
            change = _Change(partial(self._put, name, salt, base, value), name, max(1, num_bytes))
            if self._journals.add(self, change):
                self._held[name] = salt

    def drop(self, names: Iterable[str]) -> None:
        self._change(names, self._drop, drops=True)

    def use(self, names: Iterable[str]) -> None:
        """Values count as used, one after the other, and after each its bases."""
        self._change(names, self._use)

    def _change(self, names: Iterable[str], write: Callable[..., None], *, drops: bool = False) -> None:
        with self._lock:
            known = [name for name in names if name in self._held]
            for name in known if drops else ():
                self._held.pop(name, None)
            if known:
                self._journals.add(self, _Change(partial(write, known)))

    def clear(self, salts: str = "") -> None:
        """Drop the values of all salts that begin with `salts`."""
        with self._lock:
            names = {name for name, salt in self._held.items() if salt.startswith(salts)}
            self._held = {name: salt for name, salt in self._held.items() if name not in names}
            self._journals.discard(self, names)

    # -- on the thread of the journals

    def _restore(self, take: Callable[[Restored], None]) -> None:
        rows: list[tuple[Any, ...]] = []
        try:
            self._journals.run(lambda connection: rows.extend(self._read(connection)))
            values = [Kept(name, _text(salt), base, body) for name, salt, base, body, _ in rows]
            with self._lock:
                self._held = {**{kept.name: kept.salt for kept in values}, **self._held}
            take(Restored(values, [row[0] for row in sorted(rows, key=lambda row: row[-1])]))
        finally:
            self._is_restored.set()

    def _read(self, connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
        """The rows that are intact. The others are removed."""
        rows, damaged = [], []
        columns = "rowid, name, salt, base, value, put, used, checksum"
        for rowid, *row, put, used, checksum in connection.execute(
            f"SELECT {columns} FROM kept WHERE kind = ? AND scope = ? ORDER BY put", self._place
        ):
            if checksum == _checksum(*self._place, *row, put) and isinstance(used, int):
                rows.append((*row, used))
            else:
                damaged.append((rowid,))
        if damaged:
            logger.warning("%d remembered values on disk were damaged and are removed.", len(damaged))
            connection.executemany("DELETE FROM kept WHERE rowid = ?", damaged)
        return rows

    def _put(
        self, name: str, salt: str, base: str | None, value: Callable[[], Any], connection: sqlite3.Connection
    ) -> None:
        try:
            body = _bytes(json.dumps(value(), ensure_ascii=False, separators=(",", ":")))
        except _NO_JSON:
            logger.exception("A value is not kept")
            body = None
        if body is None or len(body) * _VALUE_SHARE > self._journals.max_bytes:
            with self._lock:
                self._held.pop(name, None)
            return
        if not self._journals.charge(len(body)):
            raise _NotNow
        [put] = connection.execute("SELECT coalesce(max(put), 0) + 1 FROM kept").fetchone()
        row = (*self._place, name, _bytes(salt), base, body)
        connection.execute(
            "INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?, ?)",
            (*row[:-1], len(body), put, _checksum(*row, put), body),
        )
        self._use([name], connection)

    def _drop(self, names: list[str], connection: sqlite3.Connection) -> None:
        rows = [(*self._place, name) for name in names]
        connection.executemany("DELETE FROM kept WHERE kind = ? AND scope = ? AND name = ?", rows)

    def _use(self, names: list[str], connection: sqlite3.Connection) -> None:
        where = "WHERE kind = ? AND scope = ? AND name = ?"
        [used] = connection.execute("SELECT coalesce(max(used), 0) FROM kept").fetchone()
        for first in names:
            seen: set[str] = set()
            name: str | None = first
            while name is not None and name not in seen:
                seen.add(name)
                used += 1
                row = (*self._place, name)
                connection.execute(f"UPDATE kept SET used = ? {where}", (used, *row))
                found = connection.execute(f"SELECT base FROM kept {where}", row).fetchone()
                name = found and found[0]


class _NotNow(Exception):
    """The daily budget is used up, or the disk has too little free space."""


class Journals:
    """The database of one folder, and the thread that reads and writes it. Any thread may use it."""

    def __init__(self, database: Database, *, charge: Charge = lambda num_bytes: True, max_bytes: int = MAX_BYTES):
        """`charge` is asked before bytes are written. If it refuses, they wait. One kind has at most `max_bytes`.

        The database is closed with the thread.
        """
        self.charge, self.max_bytes = charge, max_bytes
        self._database = database
        self._condition = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._waiting: list[tuple[Journal, _Change]] = []
        self._write_at_s = 0.0  # by the monotonic clock
        self._opened: dict[tuple[str, str], Journal] = {}  # by kind and scope
        self._is_busy = self._is_closed = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="journals", daemon=True)
        self._thread.start()

    def open(self, kind: str, fingerprint: str = "") -> Journal:
        """The values of one kind, and of one checkpoint unless what is kept belongs to none."""
        place = (f"{kind}.{KEPT_VERSION}", fingerprint)
        self._opened[place] = Journal(self, *place)
        return self._opened[place]

    def clear(self, salts: str, kinds: Container[str]) -> None:
        """Drop the values of all salts that begin with `salts`, of these kinds and of every checkpoint.

        Nothing of them stays in the files.
        """
        for (kind, _), journal in self._opened.items():
            if kind_of(kind) in kinds:
                journal.clear(salts)
        self.soon(lambda: self._clear(salts, kinds))

    def soon(self, job: Callable[[], None]) -> bool:
        """Do something on the thread, before anything else is written. Returns False after the end."""
        with self._condition:
            if not self._is_closed:
                self._jobs.append(job)
                self._condition.notify_all()
            return not self._is_closed

    def add(self, journal: Journal, change: _Change) -> bool:
        """Returns False if too much waits already, or after the end."""
        with self._condition:
            num_waiting = sum(other.num_bytes for _, other in self._waiting)
            is_full = num_waiting and num_waiting + change.num_bytes > MAX_WAITING_BYTES
            if self._is_closed or (change.num_bytes and is_full):
                return False
            if not self._waiting:
                self._write_at_s = time.monotonic() + _DELAY_S
            self._waiting.append((journal, change))
            self._condition.notify_all()
            return True

    def discard(self, journal: Journal, names: Container[str]) -> None:
        """Do not write the values of these names that wait."""
        with self._condition:
            self._waiting = [item for item in self._waiting if item[0] is not journal or item[1].name not in names]

    def flush(self, timeout_s: float = _CLOSE_S) -> bool:
        """Write what waits. Returns whether nothing waits any more."""
        with self._condition:
            self._write_at_s = 0.0
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_idle or self._write_at_s > time.monotonic() + _DELAY_S, timeout_s)
            return self._is_idle

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write what waits, once more if it failed before, and end the thread."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(timeout_s)

    @property
    def _is_idle(self) -> bool:
        return not (self._waiting or self._jobs or self._is_busy)

    # -- on the thread

    def _run(self) -> None:
        while (work := self._next()) is not None:
            with Fence("the remembered values, which go on with what is next"):
                work()
        self._database.close()

    def _next(self) -> Callable[[], None] | None:
        """What to do next, once it is due; None at the end."""
        with self._condition:
            self._is_busy = False
            self._condition.notify_all()
            while True:
                rest_s = self._write_at_s - time.monotonic()
                if self._jobs:
                    self._is_busy = True
                    return self._jobs.popleft()
                if self._waiting and (rest_s <= 0 or self._is_closed):
                    self._is_busy = True
                    waiting, self._waiting = self._waiting, []
                    return partial(self._write, waiting)
                if self._is_closed:
                    return None
                self._condition.wait(rest_s if self._waiting else None)

    def _write(self, waiting: list[tuple[Journal, _Change]]) -> None:
        """Write changes in one transaction. What may not be written now is tried again later, but for the end."""

        def write(connection: sqlite3.Connection) -> None:
            for _, change in waiting:
                change.write(connection)
            self._shrink(connection)

        try:
            is_done = self.run(write)
        except _NotNow:
            is_done = False
        with self._condition:
            if not is_done and not self._is_closed:
                self._waiting = waiting + self._waiting
                self._write_at_s = time.monotonic() + _RETRY_S

    def _clear(self, salts: str, kinds: Container[str]) -> None:
        if self.run(lambda connection: clear_kept(connection, salts, kinds)):
            self._database.shorten()

    def run(self, work: Callable[[sqlite3.Connection], None]) -> bool:
        """Do work in one transaction. Returns False if the database cannot be used now."""
        try:
            self._database.run(work)
        except (FolderUnusable, NoRoom) as error:
            if not self._has_failed:
                logger.warning("What is remembered cannot be read or written now, and is tried again: %s", error)
            self._has_failed = True
            return False
        self._has_failed = False
        return True

    def _shrink(self, connection: sqlite3.Connection) -> None:
        """Of each kind that has too much, remove what was not used for longest."""
        for kind, num_bytes in connection.execute("SELECT kind, sum(bytes) FROM kept GROUP BY kind").fetchall():
            excess, removed = num_bytes - self.max_bytes, []
            for row in connection.execute("SELECT rowid, scope, name, bytes FROM kept WHERE kind = ? ORDER BY used",
                                          (kind,)) if excess > 0 else ():  # fmt: skip
                if excess <= 0:
                    break
                excess -= row[-1]
                removed.append(row)
            connection.executemany("DELETE FROM kept WHERE rowid = ?", [(row[0],) for row in removed])
            for _, scope, name, _ in removed:
                if (journal := self._opened.get((kind, scope))) is not None:
                    journal.drop([name])  # so that nothing counts on it as a base


def _checksum(*fields: object) -> bytes:
    return xxh3_64(repr(fields).encode()).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
