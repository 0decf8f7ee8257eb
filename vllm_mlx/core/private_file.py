"""Writes a file as a whole, for its owner alone. Knows no folder's limits."""

import contextlib
import os
import secrets
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Write the file in place of an older one: a reader finds one or the other, and no other user may read it.

    Raises OSError. Then the older file stays, and nothing is left beside it.
    """
    draft = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(content)
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)  # it is still there only after an error
