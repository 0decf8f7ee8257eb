"""The SQLite database in the folder of the cache: its connection, its tables, and damage of the whole file."""

import os
import sqlite3
from collections.abc import Container
from pathlib import Path

NAME = "index.sqlite"
VERSION = 1  # the format of the values that are kept; those of another version are removed
_LOCK_S = 5.0  # to wait for another server that writes
_MALFORMED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLE = """
CREATE TABLE IF NOT EXISTS kept (
    kind TEXT, scope TEXT, name TEXT, salt BLOB, base TEXT, bytes INTEGER, put INTEGER, used INTEGER,
    checksum BLOB, value BLOB, PRIMARY KEY (kind, scope, name))
"""
_INDEXES = ("CREATE INDEX IF NOT EXISTS put ON kept (put)", "CREATE INDEX IF NOT EXISTS used ON kept (used)")


def connect(path: Path) -> sqlite3.Connection:
    """Open the database, or make it. Raises sqlite3.Error and OSError."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    connection = sqlite3.connect(path, timeout=_LOCK_S, isolation_level="IMMEDIATE", check_same_thread=False)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")  # the checksum shows what is damaged
    try:
        connection.execute("PRAGMA auto_vacuum = FULL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")
        [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        with connection:
            for statement in (_TABLE, *_INDEXES):
                connection.execute(statement)
            connection.execute("DELETE FROM kept WHERE kind NOT LIKE ?", (f"%.{VERSION}",))
            connection.execute("SELECT kind, scope, name, salt, base, value, bytes, put, used, checksum FROM kept")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def remove(path: Path) -> None:
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)


def shorten(connection: sqlite3.Connection) -> None:
    """Empty the write-ahead log, which keeps what was removed until then."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def is_malformed(error: sqlite3.Error) -> bool:
    """Whether only an empty database helps."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF in _MALFORMED or code == sqlite3.SQLITE_ERROR


def clear_kept(path: Path, salts: str, kinds: Container[str] | None = None) -> None:
    """Remove all values of salts that begin with `salts`. A server may use the database. Raises sqlite3.Error."""
    if path.exists():
        connection = connect(path)
        with connection:
            clear(connection, salts, kinds)
        shorten(connection)
        connection.close()


def clear(connection: sqlite3.Connection, salts: str, kinds: Container[str] | None) -> None:
    """Remove the values of salts that begin with `salts`, of these kinds or of all."""
    rows = connection.execute("SELECT rowid, kind, salt FROM kept").fetchall()
    found = [
        (rowid,)
        for rowid, kind, salt in rows
        if (kinds is None or kind_of(kind) in kinds) and salt.startswith(salts.encode("utf-8", "surrogatepass"))
    ]
    connection.executemany("DELETE FROM kept WHERE rowid = ?", found)


def kind_of(kind: str) -> str:
    """A kind without the version of its values."""
    return kind.rpartition(".")[0]
