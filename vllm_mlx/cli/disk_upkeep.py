"""What `vllm-mlx cache --disk` changes in the folder of cached state, and a check of every byte."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..disk.database import NAME, clear_kept
from ..disk.own_files import database_files, record_files
from ..disk.verify import verify
from .disk import Kept, disk_config, explained, open_folder
from .terminal import CommandFailed, ExitCode, SafeConsole, WrongUsage, duration, readable


def check(cache_dir: str | None, *, as_json: bool) -> None:
    """Read every byte. Damaged files are removed. Ends with code 1 if there are any."""
    folder = open_folder(disk_config(cache_dir), repairs=True)
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
            print(f"{num_others:,} files of another version were not read.")
        for fault in faults:
            print(f"{fault['file']} was damaged and is removed: {fault['fault']}.")
        if not faults:
            print("Every byte is as it was written.")
    if faults:
        sys.exit(ExitCode.FAILED)


def clear(kept: Kept, salt: str | None, *, is_sure: bool, as_json: bool) -> None:
    """Remove all records, or those of salts that begin with `salt`, and what is remembered of replies and Responses."""
    root = kept.folder.root
    with explained():
        if salt is None:
            sizes = [path.stat().st_size for path in record_files(root)]
        else:
            found = [record for record in kept.records if record.header.salt.startswith(salt)]
            chosen = sorted(found, key=lambda record: -record.header.start)  # children come before their parents
            sizes = [record.file_bytes for record in chosen]
        words = "" if salt is None else f" of salts like {salt}"
        what = f"{_amount(sizes)} in {root} will be removed, and what is remembered{words}."
        _confirm(what, is_sure=is_sure or not (sizes or database_files(root)))
        freed = kept.folder.clear() if salt is None else kept.remove(chosen)
        clear_kept(root / NAME, salt or "")
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


@contextmanager
def _progress(text: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time left, on a terminal."""
    screen = SafeConsole(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(text, total=num_bytes)
        yield lambda amount: bar.advance(task, amount)
