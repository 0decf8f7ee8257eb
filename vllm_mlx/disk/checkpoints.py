"""Notes on the checkpoints whose state a folder keeps: records name them by fingerprint only. Knows no record."""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .own_files import NOTES
from .private_file import write_private
from .record import checkpoint_folder

if TYPE_CHECKING:  # most servers do not encrypt, and need not pay for the import
    from .cipher import Cipher

_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    fingerprint: str  # a digest of the checkpoint's files; after a dash, which library runs them
    model: str  # its name, as the user gave it
    path: str  # folder of its files


def write_note(root: Path, note: Note, cipher: "Cipher | None" = None) -> None:
    """Write the note, in place of an older one. An error of the disk is no reason not to serve, so it is ignored."""
    path = _path(root, note.fingerprint, cipher)
    content = json.dumps(asdict(note)).encode()
    if cipher is not None:
        content = cipher.seal(content, _context(path))
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, content)


def read_notes(root: Path, cipher: "Cipher | None" = None) -> dict[str, Note]:
    """By fingerprint. Notes that are damaged, or encrypted with another key, are left out."""
    found = {}
    for path in (root / NOTES).glob("[!.]*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            content: bytes | None = path.read_bytes()[:_MAX_BYTES]
            if cipher is not None and content is not None:
                content = cipher.open(content, _context(path))
            note = Note(**json.loads(content or b""))
            found[note.fingerprint] = note
    return found


def _path(root: Path, fingerprint: str, cipher: "Cipher | None") -> Path:
    return root / NOTES / f"{checkpoint_folder(fingerprint, cipher.name_key if cipher else b'')}.json"


def _context(path: Path) -> bytes:
    return f"checkpoint {path.name}".encode()
