"""The SQLite database in the folder of the cache, and the lock that makes one process the folder's only owner.

The system frees the lock when its process ends, however it ends. All threads share one connection. SQLite notices no
flipped bit in a value, so each row has its own checksum; a database that SQLite cannot read is emptied.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from ..core.errors import setting
from ..util.tasks import do_nothing
from .faults import FolderUnusable, InUse, NoRoom, usable

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
NAME = "index.sqlite"
LOCK = "owner.lock"
VERSION = 2  # the format of the tables and the files; a folder of another format is emptied
KEPT_VERSION = 1  # the format of the values that are kept; those of another version are removed
_WAIT_S = 5.0  # the longest wait for another connection, such as that of a command
_OF_THE_SYSTEM = frozenset(
    {
        sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_MISUSE,
    }
)  # fmt: skip
_TABLES = """
CREATE TABLE IF NOT EXISTS record (id INTEGER PRIMARY KEY, about BLOB, words BLOB, used REAL, checksum BLOB);
CREATE TABLE IF NOT EXISTS model (fingerprint TEXT PRIMARY KEY, name TEXT);
CREATE TABLE IF NOT EXISTS day (day INTEGER PRIMARY KEY, bytes INTEGER);
CREATE TABLE IF NOT EXISTS kept (
    kind TEXT, scope TEXT, name TEXT, salt BLOB, base TEXT, bytes INTEGER, put INTEGER, used INTEGER,
    checksum BLOB, value BLOB, PRIMARY KEY (kind, scope, name));
CREATE INDEX IF NOT EXISTS put ON kept (put);
CREATE INDEX IF NOT EXISTS used ON kept (used);
"""
_SCHEMA = "SELECT type, name, sql FROM sqlite_schema ORDER BY type, name"


class Database:
    """Raises FolderUnusable if another process owns the folder, or it cannot be used; NoRoom where the disk is full."""

    def __init__(self, root: Path):
        self.root, self.path = root, root / NAME
        self._turn = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None
        self.written: dict[int, int] = {}  # bytes by day; each day has its own sum, so a clock that is put back is safe
        self._charged: set[int] = set()  # days whose sums changed since they were stored

    def open(self) -> None:
        """Own the folder, and read the sums of the days. An error leaves the folder free.

        On a full disk, the next call of `run` tries again.
        """
        with contextlib.ExitStack() as undone:
            undone.callback(self.close)
            with contextlib.suppress(NoRoom):
                self.run(do_nothing)
            undone.pop_all()

    def run(self, work: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> T:
        """Do work in one transaction, together with the bytes that were charged until then."""
        with self._turn, usable(self.root):
            try:
                return self._run(work, *args)
            except sqlite3.Error as error:
                if not is_malformed(error):
                    raise
                logger.warning("%s is damaged (%s). It is emptied, and its values are lost.", self.path, error)
                self._disconnect()
                _remove(self.path)
                return self._run(work, *args)

    def _run(self, work: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> T:
        connection = self._connected()
        with connection:
            result = work(connection, *args)
            sums = [(day, self.written[day]) for day in self._charged]
            connection.executemany("INSERT OR REPLACE INTO day VALUES (?, ?)", sums)
        self._charged.clear()
        return result

    def charge(self, day: int, num_bytes: int) -> None:
        """Count bytes of a day. They are stored with the next transaction."""
        with self._turn:
            self.written[day] = self.written.get(day, 0) + num_bytes
            self._charged.add(day)

    def shorten(self) -> None:
        """Empty the write-ahead log, which keeps removed data until then."""
        with self._turn, usable(self.root):
            self._connected().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def size(self) -> int:
        """Return the bytes of its files."""
        return sum(path.stat().st_size for path in files(self.path) if path.exists())

    def close(self) -> None:
        """Free the folder for another process. A later use owns it again."""
        with self._turn:
            self._disconnect()
            if self._lock is not None:
                os.close(self._lock)
            self._lock = None

    def _connected(self) -> sqlite3.Connection:
        """Return the connection, which is opened again if the folder or its files were removed."""
        if not self.root.is_dir():
            self.root.mkdir(mode=0o700)
        if self._lock is None or not _is_same(self._lock, self.root / LOCK):
            self.close()
            self._lock = own(self.root)
        if self._connection is not None and not self.path.exists():
            self._disconnect()
        if self._connection is None:
            self._connection = _connect(self.path)
            days = self._connection.execute("SELECT day, coalesce(bytes + 0, 0) FROM day")
            self.written = dict(days) | self.written
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._charged.update(self.written)


def own(root: Path) -> int:
    """Lock the folder until the file that is returned is closed. Raises FolderUnusable and OSError."""
    file = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(file, 32, 0).decode("ascii", "replace").strip() or "?"
        os.close(file)
        advice = f"Choose another folder with {setting('cache_dir')}."
        if isinstance(error, BlockingIOError):
            raise InUse(f"The folder {root} is in use by another server (process {holder}).", advice) from None
        why = f"lies on a volume that knows no locks ({error.strerror})"
        raise FolderUnusable(f"The folder {root} {why}. {advice}") from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def _is_same(file: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file), path.stat())


def _connect(path: Path) -> sqlite3.Connection:
    """Open the database, or make it. Raises sqlite3.Error and OSError."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    connection = sqlite3.connect(path, timeout=_WAIT_S, isolation_level="IMMEDIATE", check_same_thread=False)
    _read_any_text(connection)
    try:
        connection.execute("PRAGMA auto_vacuum = FULL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")
        [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
        [version] = connection.execute("PRAGMA user_version").fetchone()
        if found != "ok" or version not in (0, VERSION):
            raise sqlite3.DatabaseError(found if found != "ok" else f"its format is {version}")
        connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        with contextlib.closing(sqlite3.connect(":memory:")) as empty:
            empty.executescript(_TABLES)
            if connection.execute(_SCHEMA).fetchall() != empty.execute(_SCHEMA).fetchall():
                raise sqlite3.DatabaseError("its tables are other ones")
        with connection:
            connection.execute("DELETE FROM kept WHERE kind NOT LIKE ?", (f"%.{KEPT_VERSION}",))
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def reading(path: Path) -> sqlite3.Connection:
    """Open the database for reading only, even while its owner uses it. Raises sqlite3.Error."""
    has_log = path.with_name(f"{path.name}-wal").exists()  # without one, no process has it open
    mode = "mode=ro" if has_log else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", timeout=_WAIT_S, uri=True)
    _read_any_text(connection)
    return connection


def _read_any_text(connection: sqlite3.Connection) -> None:
    connection.text_factory = lambda data: data.decode("utf-8", "replace")  # the checksum reveals damage


def files(path: Path) -> tuple[Path, ...]:
    """Return the database file and SQLite's additional files."""
    return tuple(path.with_name(f"{path.name}{end}") for end in ("", "-wal", "-shm"))


def _remove(path: Path) -> None:
    for file in files(path):
        file.unlink(missing_ok=True)


def is_malformed(error: sqlite3.Error) -> bool:
    """Return whether only an empty database helps."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return type(error) is sqlite3.DatabaseError
    if code & 0xFF == sqlite3.SQLITE_READONLY:
        return code == sqlite3.SQLITE_READONLY  # else the folder is read only, and the header of the file is intact
    return code & 0xFF not in _OF_THE_SYSTEM


def clear_kept(connection: sqlite3.Connection, salts: str, kind: str = "%") -> None:
    """Remove the kept values of salts that begin with `salts`, of one kind or of all."""
    beginning = salts.encode("utf-8", "surrogatepass").hex()
    where = "hex(salt) LIKE ? AND kind LIKE ?"
    connection.execute(f"DELETE FROM kept WHERE {where}", (f"{beginning}%", f"{kind}.{KEPT_VERSION}"))
