"""What `vllm-mlx cache --disk` changes in the folder of cached state, and what it reads whole: checks and exports."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..disk.archive import check_export, export_path, import_path, verify
from ..disk.checkpoints import Note, read_notes
from ..disk.conversations import least_recently_used, unused_since, with_what_follows
from ..disk.journal_file import clear_journals
from ..disk.own_files import JOURNALS, journal_files, record_files
from ..disk.record import Record
from .disk import Kept, disk_config, explained, model_of, open_folder
from .models import local_folder
from .terminal import CommandFailed, ExitCode, SafeConsole, WrongUsage, duration, readable
from .values import read_bytes

_DAY_S = 86_400
_PRUNE_HINT = "Write a size to keep (20GB), an age (30d), or `gone` for checkpoints that are not there any more."


def check(cache_dir: str | None, key_file: str | None, *, as_json: bool) -> None:
    """Read every byte. Damaged files are removed. Ends with code 1 if there are any."""
    folder = open_folder(disk_config(cache_dir, key_file), repairs=True)
    num_files, num_bytes, faults = 0, 0, []
    started_s = time.monotonic()
    with explained(), _progress("Reading", folder.usage().used_bytes) as done:
        for finding in verify(folder):
            num_files, num_bytes = num_files + 1, num_bytes + finding.num_bytes
            done(finding.num_bytes)
            if finding.fault is not None:
                faults.append({"file": str(finding.path), "fault": finding.fault})
    took_s = time.monotonic() - started_s
    num_others = folder.usage().num_others
    if as_json:
        print(json.dumps({"files": num_files, "bytes": num_bytes, "unread": num_others, "damaged": faults}, indent=2))
    else:
        print(f"{num_files:,} files, {readable(num_bytes)}, read in {duration(took_s)}.")
        if num_others:
            print(f"{num_others:,} files of another key or version were not read.")
        for fault in faults:
            print(f"{fault['file']} was damaged and is removed: {fault['fault']}.")
        if not faults:
            print("Every byte is as it was written.")
    if faults:
        sys.exit(ExitCode.FAILED)


def prune(kept: Kept, what: str, *, is_sure: bool, as_json: bool) -> None:
    """Remove what `to_prune` chooses."""
    with explained():
        records = to_prune(kept, what, time.time())
    sizes = [record.file_bytes for record in records]
    _confirm(f"{_amount(sizes)} in {kept.folder.root} will be removed.", is_sure=is_sure or not records)
    freed = kept.remove(records)
    with explained():
        kept.folder.clean()
    _report(len(records), freed, as_json=as_json)


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
    """Remove all files of the cache, or what belongs to salts that begin with `salt`; stored responses too."""
    root = kept.folder.root
    with explained():
        journals = [path.stat().st_size for path in journal_files(root / JOURNALS)]
        if salt is None:
            sizes = [path.stat().st_size for path in record_files(root)] + journals
            _confirm(f"{_amount(sizes)} in {root} will be removed.", is_sure=is_sure or not sizes)
            freed = sum(journals) + kept.folder.clear()
        else:
            chosen = with_what_follows(kept.records, lambda record: record.header.salt.startswith(salt))
            sizes = [record.file_bytes for record in chosen]
            what = f"{_amount(sizes)} in {root} will be removed, and what its journals hold of salts like {salt}."
            _confirm(what, is_sure=is_sure or not (sizes or journals))
            freed = kept.remove(chosen)
        clear_journals(root / JOURNALS, salt or "", kept.folder.cipher)
        kept.folder.clean()
    _report(len(sizes), freed, as_json=as_json)


def _amount(sizes: list[int]) -> str:
    return f"{len(sizes):,} files with {readable(sum(sizes))}"


def _confirm(what: str, *, is_sure: bool) -> None:
    """Ask, on a terminal. Raises WrongUsage elsewhere, and CommandFailed if the answer is no."""
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise WrongUsage(f"{what} Add --yes to do that without a question.")
    print(f"{what} Go on? [y/N] ", end="", file=sys.stderr, flush=True)  # not among what --json prints
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandFailed("Nothing was removed.")


def _report(num_files: int, freed_bytes: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"removed_files": num_files, "freed_bytes": freed_bytes}, indent=2))
    else:
        print(f"{num_files:,} files were removed, {readable(freed_bytes)} freed.")


def export(kept: Kept, file: Path, wanted: str, *, as_json: bool) -> None:
    conversation, file = kept.find(wanted), file.expanduser()
    if file.exists():
        raise WrongUsage(f"{file} exists already: choose another name, or remove it first.")
    with explained(), _progress("Writing", conversation.num_bytes) as done:
        size = export_path(kept.folder, _noticed(conversation.records, done), file)
    tokens, model = conversation.num_tokens, kept.model_of(conversation.runs[-1].header.fingerprint)
    if as_json:
        print(json.dumps({"file": str(file), "bytes": size, "tokens": tokens, "model": model}, indent=2))
        return
    warning = " The file is not encrypted." if kept.folder.cipher is not None else ""
    print(f"{tokens:,} tokens of {model} are in {file}, {readable(size)}.{warning}")


def _noticed(records: Iterable[Record], done: Callable[[int], None]) -> Iterator[Record]:
    """The records; each is done when the next one is asked for."""
    for record in records:
        yield record
        done(record.file_bytes)


def import_(cache_dir: str | None, key_file: str | None, file: Path, model: str | None, *, as_json: bool) -> None:
    """Add a file. `model`: the checkpoint that it is for, if that one's files were copied or fetched again."""
    config, file = disk_config(cache_dir, key_file), file.expanduser()
    fingerprint = None if model is None else _fingerprint(model)
    with explained():
        check_export(file)
        folder = open_folder(config, is_new=True)
        added = import_path(folder, file, fingerprint)
        notes = read_notes(folder.root, folder.cipher)
    if not added:
        raise CommandFailed(f"{file} holds no conversation.")
    found = added[-1].header.fingerprint
    tokens, name = max(record.header.end for record in added), model or model_of(notes, found)
    is_served = model is not None or not _is_gone(notes.get(found), if_unknown=True)
    if as_json:
        print(json.dumps({"tokens": tokens, "model": name, "files": len(added), "is_served": is_served}, indent=2))
        return
    print(f"{tokens:,} tokens were added for {name}.")
    if not is_served:
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
