"""How many bytes a folder holds and how many were written on which day: one small file that several servers share.

Every change of the folder is made while the file is locked, so that no two servers use the same free bytes. The lock
ends with its process, however that ends.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_FILE_BYTES = 4096  # always this long, so that one write replaces everything
_MAX_DAYS = 32
_DAY_S = 24 * 3600
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def day_of(now: float) -> int:
    return int(now // _DAY_S)


@dataclass(slots=True)
class Account:
    """`used_bytes` is never less than what the folder's files take; None: they have not been counted.

    Each day has its own sum, and no other day's sum is looked at. So a clock that is put back finds what was written
    on that day already, and a clock that was wrong by years has no lasting effect.
    """

    used_bytes: int | None = None
    written: dict[int, int] = field(default_factory=dict)  # bytes by day, in the order of the last writing

    def add(self, num_bytes: int) -> None:
        if self.used_bytes is not None:
            self.used_bytes = max(0, self.used_bytes + num_bytes)

    def charge(self, day: int, num_bytes: int) -> None:
        self.written[day] = max(0, self.written.pop(day, 0) + num_bytes)
        while len(self.written) > _MAX_DAYS:
            del self.written[next(iter(self.written))]


class Ledger:
    def __init__(self, path: Path):
        self._path = path

    def peek(self) -> Account:
        """The account as it is now, without waiting for a lock. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return _account(self._path.read_bytes())
        return Account()

    @contextlib.contextmanager
    def locked(self) -> Iterator[Account]:
        """The account, which nobody else reads or writes meanwhile. Changes are kept. Raises OSError."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            lock(file)
            before = os.pread(file, _FILE_BYTES, 0)
            account = _account(before)
            try:
                yield account
            finally:
                text = json.dumps({"used_bytes": account.used_bytes, "written": account.written}).encode()
                if (after := text.ljust(_FILE_BYTES)) != before:
                    os.pwrite(file, after, 0)
        finally:
            os.close(file)


def lock(file: int, *, wait: bool = True) -> bool | None:
    """Lock a file until it is closed. Returns False if another process or thread has it, and `wait` is not set.

    Some file systems in a network know no locks: None. One server alone keeps the limits there.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _account(content: bytes) -> Account:
    """A file that makes no sense, as after a loss of power, counts as none."""
    try:
        values = json.loads(content)
        written = {int(day): int(num_bytes) for day, num_bytes in values["written"].items()}
        used_bytes = values["used_bytes"]
        return Account(used_bytes if used_bytes is None else int(used_bytes), written)
    except (ValueError, LookupError, TypeError, AttributeError):
        return Account()
