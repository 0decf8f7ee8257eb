"""Faults of the cache's folder. Knows no record."""

import contextlib
import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ..core.errors import setting

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Damaged(Exception):
    """The bytes are not the ones that were written."""

    name = ""  # the record's, once it is known


class NoRoom(Exception):
    """Nothing more may be written now. `limit` says why. Removing records helps with `cap` and `free`."""

    def __init__(self, limit: Literal["cap", "daily", "free", "disk"], message: str):
        super().__init__(message)
        self.limit = limit


class FolderUnusable(Exception):
    """The folder is gone, or may not be read or written. The next call tries again."""


class InUse(FolderUnusable):
    """Another process owns the folder. `fact` says so without the advice for a server."""

    def __init__(self, fact: str, advice: str):
        super().__init__(f"{fact} {advice}")
        self.fact = fact


@contextlib.contextmanager
def usable(root: Path) -> Iterator[None]:
    """Errors of the system and of SQLite inside become NoRoom or FolderUnusable."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if not root.is_dir():
            raise FolderUnusable(f"The cache on disk is gone: there is no folder {root}.") from error
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if getattr(error, "errno", None) in FULL or code == sqlite3.SQLITE_FULL:
            raise NoRoom(
                "disk", f"Nothing more can be written to {root} ({reason}). Remove other files, or choose another "
                f"folder with {setting('cache_dir')}.",
            ) from error  # fmt: skip
        raise FolderUnusable(
            f"The cache on disk cannot be used ({reason}: {getattr(error, 'filename', None) or root}). Give this user "
            f"the right to read and write it, or choose another folder with {setting('cache_dir')}."
        ) from error
