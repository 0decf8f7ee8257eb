"""What `vllm-mlx cache --disk` finds in the folder of cached state on this machine. No server has to run."""

import itertools
import json
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from ..core.config import EngineConfig
from ..disk.checkpoints import Note, read_notes
from ..disk.conversations import (
    Conversation,
    conversations,
)
from ..disk.folder import Folder
from ..disk.place import default_max_bytes, floor_bytes, folder_of, nothing_in
from ..disk.record import Damaged, Record
from ..disk.space import FolderUnusable, NoRoom
from .options import load_settings
from .terminal import (
    TABLE,
    CommandFailed,
    console,
    duration,
    number_columns,
    readable,
)

_MAX_ROWS = 100  # rows of a printed list
_ID_CHARS = 8  # characters of a conversation's name; more where two begin with the same ones
_DAY_S = 86_400


class NothingKept(CommandFailed):
    """There is no folder, or it is not the cache's."""

    def __init__(self, folder: Path, why: str):
        super().__init__(f"Nothing is kept on disk: {why}. --cache-dir names another folder.")
        self.folder = folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The folder that the settings name, and what it holds. Only `remove` changes it."""

    folder: Folder
    records: list[Record]
    notes: Mapping[str, Note]

    @classmethod
    def open(cls, cache_dir: str | None) -> "Kept":
        """Raises ConfigError, and CommandFailed, of which NothingKept is one."""
        folder = open_folder(disk_config(cache_dir))
        with explained():
            return cls(folder=folder, records=list(folder.scan()), notes=read_notes(folder.root))

    def conversations(self) -> list[Conversation]:
        return conversations(self.records)

    def ids(self) -> dict[str, str]:
        """A short name for each conversation, by its complete one."""
        names = sorted(conversation.name for conversation in self.conversations())
        alike = max((_num_alike(*pair) for pair in itertools.pairwise(names)), default=0)
        return {name: name[: max(_ID_CHARS, alike + 1)] for name in names}

    def model_of(self, fingerprint: str) -> str:
        return model_of(self.notes, fingerprint)

    def remove(self, records: Iterable[Record]) -> int:
        """Remove records, which come before what they continue. Returns the bytes."""
        freed = 0
        with explained():
            for record in records:
                self.folder.remove(record)
                freed += record.file_bytes
        return freed


def model_of(notes: Mapping[str, Note], fingerprint: str) -> str:
    note = notes.get(fingerprint)
    return f"checkpoint {fingerprint[:8]}" if note is None else note.model


def disk_config(cache_dir: str | None) -> EngineConfig:
    """The settings of `serve`. What was kept can be looked at, whether more is kept or not."""
    given = {"cache_dir": cache_dir}
    settings = load_settings({name: value for name, value in given.items() if value is not None})
    keeps = {"cache_disk": settings.cache_disk or None, "prefix_cache": True, "repeatable": False}
    return settings.model_copy(update=keeps).engine_config()


def open_folder(config: EngineConfig, *, repairs: bool = False) -> Folder:
    """The folder of the settings, which has to exist. Raises CommandFailed."""
    root = folder_of(config.cache_dir)
    with explained():
        if (why := nothing_in(root)) is not None:
            raise NothingKept(root, why)
        return Folder(
            root,
            max_bytes=config.cache_disk_bytes or default_max_bytes(root),
            daily_bytes=sys.maxsize,  # what a user asks for is written today
            floor_bytes=floor_bytes(root),
            repairs=repairs,
        )


@contextmanager
def explained() -> Iterator[None]:
    """Errors of the folder and of the system become CommandFailed."""
    try:
        yield
    except (FolderUnusable, NoRoom, Damaged) as error:
        raise CommandFailed(str(error)) from error
    except sqlite3.Error as error:
        raise CommandFailed(f"The database of the cache cannot be used: {error}.") from error
    except OSError as error:
        raise CommandFailed(f"{error.filename or 'The disk'}: {error.strerror or error}.") from error


def _num_alike(one: str, other: str) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def show(cache_dir: str | None, *, as_json: bool) -> None:
    """Print the conversations, those used last first. It is no fault that there are none."""
    try:
        kept = Kept.open(cache_dir)
    except NothingKept as error:
        if as_json:
            empty = {"folder": str(error.folder), "used_bytes": 0, "other_bytes": 0, "damaged": 0}
            print(json.dumps({**empty, "files": 0, "checkpoints": []}, indent=2))
        else:
            print(error.message)
        return
    listed = _listed(kept)
    if as_json:
        print(json.dumps(listed, indent=2))
        return
    usage = kept.folder.usage()
    screen = console()
    for checkpoint in listed["checkpoints"]:
        screen.print(_table(checkpoint))
    others = f", {readable(usage.other_bytes)} of them of another version" if usage.other_bytes else ""
    screen.print(
        f"{kept.folder.root}: {readable(usage.used_bytes)} in {len(kept.records):,} files{others}; "
        f"{readable(usage.free_bytes)} free on its disk.",
        markup=False,
    )
    if listed["damaged"]:
        screen.print(f"{listed['damaged']:,} files are damaged: --verify names and removes them.")


def _listed(kept: Kept) -> dict[str, Any]:
    usage, ids, now = kept.folder.usage(), kept.ids(), time.time()
    by_checkpoint: dict[str, list[dict[str, Any]]] = {}
    for conversation in kept.conversations():
        header = conversation.runs[-1].header
        fields = {
            "id": ids[conversation.name],
            "tokens": conversation.num_tokens,
            "bytes": conversation.num_bytes,
            "own_bytes": conversation.own_bytes,
            "snapshots": len(conversation.states),
            "salt": header.salt,
            "used": conversation.used_s,
            "age_s": round(max(0.0, now - conversation.used_s), 1),
        }
        by_checkpoint.setdefault(header.fingerprint, []).append(fields)
    return {
        "folder": str(kept.folder.root),
        "used_bytes": usage.used_bytes,
        "other_bytes": usage.other_bytes,
        "damaged": len(kept.folder.damages),
        "files": len(kept.records),
        "checkpoints": [
            {"fingerprint": fingerprint, "model": kept.model_of(fingerprint), "conversations": found}
            for fingerprint, found in by_checkpoint.items()
        ],
    }


def _table(checkpoint: Mapping[str, Any]) -> Table:
    found = checkpoint["conversations"]
    table = Table(
        Column("Conversation", no_wrap=True),
        *number_columns("Tokens", "Size", "Alone", "Snapshots", "Last used"),
        "Salt",
        title=f"{checkpoint['model']}: {'1 conversation' if len(found) == 1 else f'{len(found):,} conversations'}",
        title_justify="left",
        **TABLE,
    )
    for fields in found[:_MAX_ROWS]:
        table.add_row(
            fields["id"],
            f"{fields['tokens']:,}",
            readable(fields["bytes"]),
            readable(fields["own_bytes"]),
            f"{fields['snapshots']:,}",
            f"{age(fields['age_s'])} ago",
            _short(fields["salt"]),
        )
    if len(found) > _MAX_ROWS:
        table.add_row(f"and {len(found) - _MAX_ROWS:,} more: see --json")
    return table


def _short(salt: str) -> str:
    return salt if len(salt) <= _ID_CHARS + 1 else f"{salt[:_ID_CHARS]}…"


def age(seconds: float) -> str:
    return f"{seconds / _DAY_S:.0f} days" if seconds >= 2 * _DAY_S else duration(seconds)
