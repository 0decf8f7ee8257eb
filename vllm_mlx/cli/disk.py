"""What `vllm-mlx cache --disk` does with the folder of cached state on this machine. No server has to run."""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..core.config import EngineConfig
from ..disk.archive import export_path, import_path, verify
from ..disk.checkpoints import Note, read_notes
from ..disk.conversations import (
    Conversation,
    conversations,
    least_recently_used,
    unused_since,
    with_what_follows,
)
from ..disk.folder import Folder
from ..disk.journal_file import clear_journals
from ..disk.place import default_max_bytes, floor_bytes, folder_of, prepare
from ..disk.record import WORD_BYTES, Damaged, Record
from ..disk.space import FolderUnusable, NoRoom
from .models import local_folder
from .options import load_settings
from .terminal import (
    TABLE,
    CommandFailed,
    ExitCode,
    SafeConsole,
    WrongUsage,
    console,
    duration,
    number_columns,
    readable,
)
from .values import read_bytes

_MAX_ROWS = 100  # rows of a printed list
_ID_CHARS = 8  # characters of a conversation's name; more where two begin with the same ones
_DAY_S = 86_400
_START_TOKENS = 24  # tokens of a conversation's text
_PRUNE_HINT = "Write a size to keep (20GB), an age (30d), or `gone` for checkpoints that are not there any more."


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The folder that the settings name, and what it holds."""

    folder: Folder
    records: list[Record]
    notes: Mapping[str, Note]

    @classmethod
    def open(cls, cache_dir: str | None, key_file: str | None, *, makes: bool = False) -> "Kept | None":
        """None: there is no such folder, unless `makes` asks for one. Raises ConfigError and CommandFailed."""
        given = {"cache_dir": cache_dir, "cache_disk_key_file": key_file}
        config = _config({name: value for name, value in given.items() if value is not None})
        root = folder_of(config.cache_dir)
        if makes and (trouble := prepare(root)) is not None:
            raise CommandFailed(f"{trouble}. Name another folder with --cache-dir.")
        if not root.is_dir():
            return None
        folder = _opened(root, config)
        with _explained():
            return cls(folder=folder, records=list(folder.scan()), notes=read_notes(root, folder.cipher))

    def conversations(self) -> list[Conversation]:
        return conversations(self.records)

    def ids(self) -> dict[str, str]:
        """A short name for each conversation, by its complete one."""
        names = sorted(conversation.name for conversation in self.conversations())
        alike = max((_num_alike(*pair) for pair in itertools.pairwise(names)), default=0)
        return {name: name[: max(_ID_CHARS, alike + 1)] for name in names}

    def find(self, wanted: str) -> Conversation:
        found = [conversation for conversation in self.conversations() if conversation.name.startswith(wanted)]
        if len(found) == 1:
            return found[0]
        trouble = "no conversation's" if not found else f"the beginning of {len(found)} conversations'"
        raise WrongUsage(f"{wanted or 'Nothing'} is {trouble} id. `vllm-mlx cache --disk` lists them.")

    def model_of(self, fingerprint: str) -> str:
        note = self.notes.get(fingerprint)
        return f"checkpoint {fingerprint[:8]}" if note is None else note.model

    def remove(self, records: Iterable[Record]) -> int:
        """Remove records, which come before what they continue. Returns the bytes."""
        freed = 0
        with _explained():
            for record in records:
                self.folder.remove(record)
                freed += record.file_bytes
        return freed


def _config(given: Mapping[str, str]) -> EngineConfig:
    """The settings of `serve`. What was kept can be looked at, whether more is kept or not."""
    settings = load_settings(given)
    keeps = {"cache_disk": settings.cache_disk or None, "prefix_cache": True, "repeatable": False}
    return settings.model_copy(update=keeps).engine_config()


def _opened(root: Path, config: EngineConfig) -> Folder:
    cipher = None
    if config.cache_disk_key_file is not None:
        from ..disk.cipher import Cipher

        cipher = Cipher.from_file(Path(config.cache_disk_key_file).expanduser())
    return Folder(
        root,
        max_bytes=config.cache_disk_bytes or default_max_bytes(root),
        daily_bytes=sys.maxsize,  # what a user asks for is written today
        floor_bytes=floor_bytes(root),
        cipher=cipher,
    )


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (FolderUnusable, NoRoom, Damaged) as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"{error.filename or 'The disk'}: {error.strerror or error}.") from error


def _num_alike(one: str, other: str) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def nothing(cache_dir: str | None, *, as_json: bool) -> None:
    """Say that there is no folder, for any command."""
    config = _config({} if cache_dir is None else {"cache_dir": cache_dir})
    print("{}" if as_json else f"Nothing is kept on disk: there is no folder {folder_of(config.cache_dir)}.")


def show(kept: Kept, *, as_json: bool, with_text: bool) -> None:
    """Print the conversations, those used last first."""
    listed = _listed(kept, _starts(kept) if with_text else {})
    if as_json:
        print(json.dumps(listed, indent=2))
        return
    usage = kept.folder.usage()
    screen = console()
    for checkpoint in listed["checkpoints"]:
        screen.print(_table(checkpoint, with_text=with_text))
    others = f", {readable(usage.other_bytes)} of them of another key or version" if usage.other_bytes else ""
    screen.print(
        f"{kept.folder.root}: {readable(usage.used_bytes)} in {len(kept.records):,} files{others}; "
        f"{readable(usage.free_bytes)} free on its disk.",
        markup=False,
    )


def _listed(kept: Kept, starts: Mapping[str, str]) -> dict[str, Any]:
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
        if starts:
            fields["text"] = starts.get(conversation.name, "")
        by_checkpoint.setdefault(header.fingerprint, []).append(fields)
    return {
        "folder": str(kept.folder.root),
        "encrypted": kept.folder.cipher is not None,
        "used_bytes": usage.used_bytes,
        "other_bytes": usage.other_bytes,
        "files": len(kept.records),
        "checkpoints": [
            {"fingerprint": fingerprint, "model": kept.model_of(fingerprint), "conversations": found}
            for fingerprint, found in by_checkpoint.items()
        ],
    }


def _table(checkpoint: Mapping[str, Any], *, with_text: bool) -> Table:
    found = checkpoint["conversations"]
    table = Table(
        Column("Conversation", no_wrap=True),
        *number_columns("Tokens", "Size", "Alone", "Snapshots", "Last used"),
        "Salt",
        *([Column("Own text", overflow="ellipsis", no_wrap=True)] if with_text else []),
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
            *([fields.get("text", "")] if with_text else []),
        )
    if len(found) > _MAX_ROWS:
        table.add_row(f"and {len(found) - _MAX_ROWS:,} more: see --json")
    return table


def _short(salt: str) -> str:
    return salt if len(salt) <= _ID_CHARS + 1 else f"{salt[:_ID_CHARS]}…"


def age(seconds: float) -> str:
    return f"{seconds / _DAY_S:.0f} days" if seconds >= 2 * _DAY_S else duration(seconds)


def _starts(kept: Kept) -> dict[str, str]:
    """The text with which each conversation leaves the others, where its checkpoint's tokenizer is on this machine."""
    from ..tokens.tokenizer import Tokenizer

    starts: dict[str, str] = {}
    tokenizers: dict[str, Tokenizer | None] = {}
    for conversation in kept.conversations():
        fingerprint = conversation.runs[-1].header.fingerprint
        if fingerprint not in tokenizers:
            note = kept.notes.get(fingerprint)
            is_here = note is not None and (Path(note.path) / "tokenizer.json").is_file()
            tokenizers[fingerprint] = Tokenizer.load(Path(note.path)) if note is not None and is_here else None
        tokenizer = tokenizers[fingerprint]
        if tokenizer is not None:
            starts[conversation.name] = " ".join(tokenizer.decode(_start_ids(conversation)).split())
    return starts


def _start_ids(conversation: Conversation) -> list[int]:
    """Its own first token ids, and words that stand for images."""
    words = conversation.own_words[: _START_TOKENS * WORD_BYTES]
    return [int.from_bytes(words[at : at + WORD_BYTES], "big") for at in range(0, len(words), WORD_BYTES)]


def check(kept: Kept, *, as_json: bool) -> None:
    """Read every byte. Damaged files are removed. Ends with code 1 if there are any."""
    sizes = {record.name: record.file_bytes for record in kept.records}
    faults = []
    started_s = time.monotonic()
    with _explained(), _progress("Reading", sum(sizes.values())) as done:
        for finding in verify(kept.folder):
            done(sizes.get(finding.path.stem, 0))
            if finding.fault is not None:
                faults.append({"file": str(finding.path), "fault": finding.fault})
    took_s = time.monotonic() - started_s
    if as_json:
        print(json.dumps({"files": len(sizes), "bytes": sum(sizes.values()), "damaged": faults}, indent=2))
    else:
        print(f"{len(sizes):,} files, {readable(sum(sizes.values()))}, read in {duration(took_s)}.")
        for fault in faults:
            print(f"{fault['file']} was damaged and is removed: {fault['fault']}.")
        if not faults:
            print("Every byte is as it was written.")
    if faults:
        sys.exit(ExitCode.FAILED)


def prune(kept: Kept, what: str, *, is_sure: bool, as_json: bool) -> None:
    remove(kept, to_prune(kept, what, time.time()), is_sure=is_sure, as_json=as_json)


def to_prune(kept: Kept, what: str, now: float) -> list[Record]:
    """Raises WrongUsage for what is no size, no age and not `gone`."""
    text = what.strip().lower()
    if text == "gone":
        return with_what_follows(kept.records, lambda record: _is_gone(kept.notes.get(record.header.fingerprint)))
    if text.endswith("d") and text[:-1].strip().isdecimal():
        return unused_since(kept.records, now - int(text[:-1]) * _DAY_S)
    try:
        limit = read_bytes(text)
    except ValueError:
        raise WrongUsage(f"--prune {what} is not understood. {_PRUNE_HINT}") from None
    if text.isdecimal() and 0 < limit < 10**6:
        raise WrongUsage(f"--prune {what} lacks its unit. {_PRUNE_HINT}")
    return least_recently_used(kept.records, kept.folder.usage().used_bytes - limit)


def _is_gone(note: Note | None, *, if_unknown: bool = False) -> bool:
    """Whether the checkpoint's files were removed or replaced. Without a note, nobody knows."""
    if note is None:
        return if_unknown
    from ..runner.checkpoint import Checkpoint

    path = Path(note.path)
    return not path.is_dir() or Checkpoint(path, {}).fingerprint() != note.fingerprint.partition("-")[0]


def clear(kept: Kept, salt: str | None, *, is_sure: bool, as_json: bool) -> None:
    """Remove everything, or what belongs to salts that begin with `salt`, stored responses too."""
    chosen = with_what_follows(kept.records, lambda record: record.header.salt.startswith(salt or ""))
    remove(kept, chosen, is_sure=is_sure, as_json=as_json)
    with _explained():
        clear_journals(kept.folder.root, salt or "", kept.folder.cipher)


def remove(kept: Kept, records: list[Record], *, is_sure: bool, as_json: bool) -> None:
    num_bytes = sum(record.file_bytes for record in records)
    if records and not is_sure:
        _confirm(f"{len(records):,} files with {readable(num_bytes)} in {kept.folder.root} will be removed.")
    freed = kept.remove(records)
    if as_json:
        print(json.dumps({"removed_files": len(records), "freed_bytes": freed}, indent=2))
    else:
        print(f"{len(records):,} files were removed, {readable(freed)} freed.")


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise WrongUsage(f"{what} Add --yes to do that without a question.")
    try:
        answer = input(f"{what} Go on? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise CommandFailed("Nothing was removed.")


def export(kept: Kept, file: Path, wanted: str) -> None:
    conversation = kept.find(wanted)
    if file.exists():
        raise WrongUsage(f"{file} exists already: choose another name, or remove it first.")
    with _explained(), _progress("Writing", conversation.num_bytes) as done:
        size = export_path(kept.folder, _noticed(conversation.records, done), file)
    warning = " The file is not encrypted." if kept.folder.cipher is not None else ""
    model = kept.model_of(conversation.runs[-1].header.fingerprint)
    print(f"{conversation.num_tokens:,} tokens of {model} are in {file}, {readable(size)}.{warning}")


def _noticed(records: Iterable[Record], done: Callable[[int], None]) -> Iterator[Record]:
    """The records; each is done when the next one is asked for."""
    for record in records:
        yield record
        done(record.file_bytes)


def import_(kept: Kept, file: Path, model: str | None) -> None:
    """Add a file. `model`: the checkpoint that it is for, if that one's files were copied or fetched again."""
    fingerprint = None if model is None else _fingerprint(model)
    with _explained():
        added = import_path(kept.folder, file, fingerprint)
    if not added:
        raise CommandFailed(f"{file} holds no conversation.")
    found = added[-1].header.fingerprint
    print(f"{max(record.header.end for record in added):,} tokens were added for {model or kept.model_of(found)}.")
    if model is None and _is_gone(kept.notes.get(found), if_unknown=True):
        print("No checkpoint with that fingerprint was served from this folder: import it with --model MODEL.")


def _fingerprint(model: str) -> str:
    from ..runner.checkpoint import Checkpoint

    folder = local_folder(model)
    if folder is None:
        raise WrongUsage(
            f"--model {model} is not on this machine: fetch it with `vllm-mlx models pull`, or name a folder."
        )
    return Checkpoint(folder, {}).fingerprint()


@contextmanager
def _progress(text: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time left, on a terminal."""
    screen = SafeConsole(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(text, total=num_bytes)
        yield lambda amount: bar.advance(task, amount)
