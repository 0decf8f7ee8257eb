"""Notes on the checkpoints whose state a folder keeps: records name them by fingerprint only. Knows no record."""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .own_files import NOTES
from .private_file import write_private
from .record import checkpoint_folder

_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    fingerprint: str  # a digest of the checkpoint's files; after a dash, which library runs them
    model: str  # its name, as the user gave it
    path: str  # folder of its files


def write_note(root: Path, note: Note) -> None:
    """Write the note, in place of an older one. An error of the disk is no reason not to serve, so it is ignored."""
    path = root / NOTES / f"{checkpoint_folder(note.fingerprint)}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, json.dumps(asdict(note)).encode())


def read_notes(root: Path) -> dict[str, Note]:
    """By fingerprint. Damaged notes are left out."""
    found = {}
    for path in (root / NOTES).glob("[!.]*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            note = Note(**json.loads(path.read_bytes()[:_MAX_BYTES]))
            found[note.fingerprint] = note
    return found
