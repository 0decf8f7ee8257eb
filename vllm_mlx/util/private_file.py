"""Writes a file as a whole, for its owner alone, and acts with the rights of another user. Knows no folder's limits."""

import contextlib
import os
import pwd
import secrets
from collections.abc import Iterator
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader finds the old file or the new one, and no other user may read it.

    Raises OSError. Then the older file stays, and no other file is left in the folder.
    """
    draft = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(content)
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)  # it is still there only after an error


@contextlib.contextmanager
def rights_of(user: str | None) -> Iterator[None]:
    """Act with the rights of `user` if this process has root's: a link then leads only where `user` may go.

    Raises KeyError for an unknown user.
    """
    if user is None or os.geteuid() != 0:
        yield
        return
    entry, root, group = pwd.getpwnam(user), pwd.getpwuid(0).pw_name, os.getegid()
    try:
        os.initgroups(user, entry.pw_gid)
        os.setegid(entry.pw_gid)
        os.seteuid(entry.pw_uid)
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.initgroups(root, group)  # on macOS, root has more groups than `setgroups` takes
