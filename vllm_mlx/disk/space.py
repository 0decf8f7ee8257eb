"""The files of a cache folder, and whether more of them fit: the cap, the daily budget, free space. It reads no record.

Every server that uses the folder changes its files while the ledger is locked, so the limits hold for all together.
"""

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.errors import setting
from .ledger import Account, Ledger, day_of, lock
from .own_files import LEDGER, drafts_in, own_bytes, record_folders

_LONG_S = 24 * 3600
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoom(Exception):
    """Nothing more may be written now. `limit` says why. Removing records helps with `cap` and `free`."""

    def __init__(self, limit: Literal["cap", "daily", "free", "disk"], message: str):
        super().__init__(message)
        self.limit = limit


class FolderUnusable(Exception):
    """The folder is gone, or may not be read or written. The next call tries again."""


@dataclass(frozen=True, slots=True)
class Figures:
    used_bytes: int  # the cache's own files in the folder
    written_bytes: int  # today
    free_bytes: int  # the volume's
    excess_bytes: int  # must be removed to keep the cap and the floor of free space


class Space:
    def __init__(self, root: Path, *, max_bytes: int, daily_bytes: int, floor_bytes: int, clock: Callable[[], float]):
        self.root = root
        self._max_bytes, self._daily_bytes, self._floor_bytes = max_bytes, daily_bytes, floor_bytes
        self._clock = clock
        self._ledger = Ledger(root / LEDGER)

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        """Errors of the system inside become NoRoom or FolderUnusable. A single file that is gone stays one."""
        try:
            yield
        except FileNotFoundError:
            if self.root.is_dir():
                raise
            raise FolderUnusable(f"The cache on disk is gone: there is no folder {self.root}.") from None
        except OSError as error:
            if error.errno in _FULL:
                raise NoRoom(
                    "disk", f"Nothing more can be written to {self.root} ({error.strerror}). Remove other files, or "
                    f"choose another folder with {setting('cache_dir')}.",
                ) from error  # fmt: skip
            raise FolderUnusable(
                f"The cache on disk cannot be used ({error.strerror}: {error.filename or self.root}). Give this user "
                f"the right to read and write it, or choose another folder with {setting('cache_dir')}."
            ) from error

    def ready(self) -> None:
        """Make the folder if only it is missing. The ones above are not made: a disk may have been unplugged."""
        if not self.root.is_dir():
            self.root.mkdir(mode=0o700)

    def clean(self) -> None:
        """Remove drafts whose writers are dead, and empty folders. Count the rest again."""
        with self._ledger.locked() as account:
            for folder in record_folders(self.root):
                for draft in drafts_in(folder):
                    with contextlib.suppress(OSError):
                        _remove_abandoned(draft)
                with contextlib.suppress(OSError):  # It is not empty.
                    folder.rmdir()
            account.used_bytes = own_bytes(self.root)

    @contextlib.contextmanager
    def writing(self, path: Path, size: int) -> Iterator[int]:
        """Open a file that will have the given size, and that becomes `path` if the block ends without an error.

        Raises NoRoom before, and FileExistsError after the writing if another server wrote the same file meanwhile.
        """
        day = day_of(self._clock())
        with self._ledger.locked() as account:
            self._check(account, day, size)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            draft = path.with_name(f".{path.stem}-{size}-{secrets.token_hex(8)}.draft")
            file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            lock(file)  # until it is closed: who finds it unlocked knows that its writer is dead
            account.add(size)
            account.charge(day, size)
        try:
            yield file
            with self._ledger.locked():
                if path.exists():  # A hard link would fail here too, but some file systems have none.
                    raise FileExistsError(errno.EEXIST, "another server has written it", str(path))
                draft.rename(path)
        except BaseException:
            with contextlib.suppress(OSError), self._ledger.locked() as account:
                written = min(size, os.fstat(file).st_size)
                draft.unlink(missing_ok=True)
                account.add(-size)
                account.charge(day, written - size)
            raise
        finally:
            os.close(file)

    def charge(self, num_bytes: int) -> bool:
        """Count bytes that are about to be written to a file of the folder that is no record. False: they may not be.

        A file that replaces another is counted beside it, until the files are counted again. Such files are small and
        grow at the cost of records: a full folder does not keep them from being written.
        """
        try:
            with self.usable(), self._ledger.locked() as account:
                day = day_of(self._clock())
                is_spent = account.written.get(day, 0) + num_bytes > self._daily_bytes
                if is_spent or shutil.disk_usage(self.root).free - num_bytes < self._floor_bytes:
                    return False
                account.add(num_bytes)
                account.charge(day, num_bytes)
        except (NoRoom, FolderUnusable, FileNotFoundError):
            return False
        return True

    def remove(self, path: Path) -> int:
        """Remove a file, and return its size; 0 if it is gone already."""
        size = 0
        try:
            with self._ledger.locked() as account:
                size = _unlinked(path)
                account.add(-size)
        except OSError:  # A full disk may refuse any writing, and needs the removal most. Too much is then counted.
            if not self.root.is_dir():
                raise
            size += _unlinked(path)
        return size

    def figures(self, *, counts: bool = False) -> Figures:
        """`counts`: look at the files themselves; else the ledger's sum is taken, if it has one."""
        account = self._ledger.peek()
        is_known = account.used_bytes is not None and not counts
        used_bytes = account.used_bytes if is_known and account.used_bytes is not None else own_bytes(self.root)
        free_bytes = shutil.disk_usage(self.root).free
        return Figures(
            used_bytes=used_bytes,
            written_bytes=account.written.get(day_of(self._clock()), 0),
            free_bytes=free_bytes,
            excess_bytes=min(used_bytes, max(0, used_bytes - self._max_bytes, self._floor_bytes - free_bytes)),
        )

    def _check(self, account: Account, day: int, size: int) -> None:
        if account.used_bytes is None or account.used_bytes + size > self._max_bytes:
            account.used_bytes = own_bytes(self.root)  # files may have been removed by hand
        if account.used_bytes + size > self._max_bytes:
            raise NoRoom(
                "cap", f"The cache on disk has {account.used_bytes} of {self._max_bytes} bytes, and {size} more do not "
                f"fit. {setting('cache_disk')} sets its size.",
            )  # fmt: skip
        if account.written.get(day, 0) + size > self._daily_bytes:
            raise NoRoom(
                "daily", f"Today's {self._daily_bytes} bytes of writing to the cache on disk are used. It goes on "
                f"tomorrow (UTC); {setting('cache_disk_daily')} sets how much may be written in a day.",
            )  # fmt: skip
        if (free_bytes := shutil.disk_usage(self.root).free) - size < self._floor_bytes:
            raise NoRoom(
                "free", f"Nothing is written to the cache on disk while the volume of {self.root} has only "
                f"{free_bytes} bytes free: {self._floor_bytes} are left to other programs. Remove files, or choose "
                f"another folder with {setting('cache_dir')}.",
            )  # fmt: skip


def _unlinked(path: Path) -> int:
    """Remove a file, and return its size; 0 if it is gone."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def _remove_abandoned(draft: Path) -> None:
    """Remove a draft, unless its writer lives and has the lock. Without locks, it must have been begun long ago."""
    file = os.open(draft, os.O_RDWR | os.O_CLOEXEC)
    try:
        is_free = lock(file, wait=False)
        if is_free or (is_free is None and time.time() - os.fstat(file).st_mtime > _LONG_S):
            draft.unlink()
    finally:
        os.close(file)
