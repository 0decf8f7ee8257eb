"""Which files of a folder are the cache's own. All others, whoever put them there, are neither counted nor touched."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .database import NAME

logger = logging.getLogger(__name__)

LEDGER = "usage.json"
JOURNALS = "journals"
NOTES = "checkpoints"
SUFFIX = ".safetensors"
_FOLDER = re.compile(r"[0-9a-f]{16}")
_RECORD = re.compile(rf"[0-9a-f]{{40}}\{SUFFIX}")
_DRAFT = re.compile(r"\.[0-9a-f]{40}-(\d+)-[0-9a-f]{16}\.draft")  # the number is the size that it will have
_DATABASE = re.compile(rf"{re.escape(NAME)}(-wal|-shm)?")
_JOURNAL = re.compile(r".+\.journal(\.new)?")  # an earlier version kept replies in them
_NOTE = re.compile(r"[^.].*\.json")


def record_folders(root: Path) -> list[Path]:
    """The folders of checkpoints. Raises OSError, also where `root` is no folder."""
    with os.scandir(root) as entries:
        return [Path(entry.path) for entry in entries if _FOLDER.fullmatch(entry.name) and _is_folder(entry)]


def record_files(root: Path) -> Iterator[Path]:
    """The files that are named like records. Raises OSError."""
    for folder in record_folders(root):
        yield from (folder / name for name, _ in _listed(folder, _RECORD))


def drafts_in(folder: Path) -> Iterator[Path]:
    """The records that are being written to the folder of a checkpoint, or that a killed process left there."""
    return (folder / name for name, _ in _listed(folder, _DRAFT))


def database_files(root: Path) -> list[Path]:
    """The database, with what SQLite keeps beside it."""
    return [root / name for name, _ in _listed(root, _DATABASE)]


def remove_journals(root: Path) -> None:
    """Remove what an earlier version remembered in another format."""
    files = [root / JOURNALS / name for name, _ in _listed(root / JOURNALS, _JOURNAL)]
    with contextlib.suppress(OSError):
        for file in files:
            file.unlink()
        (root / JOURNALS).rmdir()
    if files:
        logger.warning("What an earlier version remembered of replies was removed from %s.", root)


def own_bytes(root: Path) -> int:
    """Size of all own files but the ledger. A draft counts as what it will have when it is complete. Raises OSError."""
    return sum(_sizes(root))


def has_own_files(root: Path) -> bool:
    """Whether there is a record, a draft, a database or a note. Raises OSError."""
    return next(_sizes(root), None) is not None


def _sizes(root: Path) -> Iterator[int]:
    for folder in record_folders(root):
        yield from (size for _, size in _listed(folder, _RECORD))
        for name, _ in _listed(folder, _DRAFT):
            yield int(name.split("-")[1])
    for name, pattern in (("", _DATABASE), (JOURNALS, _JOURNAL), (NOTES, _NOTE)):
        yield from (size for _, size in _listed(root / name, pattern))


def _listed(folder: Path, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """Names and sizes of a folder's files with such names. What is removed meanwhile is left out."""
    found: list[tuple[str, int]] = []
    if folder.is_symlink():  # it leads out of the cache
        return found
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    found.append((entry.name, entry.stat(follow_symlinks=False).st_size))
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)
