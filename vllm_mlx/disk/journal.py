"""Journals: what a server remembers in addition to keys and values, in append-only files. Knows no conversation.

One file holds the values of one kind and checkpoint. Every change is appended as a record, so a process that is
killed loses at most what was not written, and damage costs the records that it hits. Servers that share a folder append
to the same files, and each reads them when it starts.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..core.fence import Fence
from .journal_file import Charge, Cipher, JournalFile, names_in
from .own_files import journal_files
from .replay import Kept, Replay, drop_record, put_record, use_record

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # the size of one journal
MAX_JOURNALS = 24  # in a folder: those written last stay when a server starts
MAX_WAITING_BYTES = 32 << 20  # in memory, of values that are not written yet
_VALUE_SHARE = 4  # a value takes at most a quarter of its journal
_START_SHARE = 8  # at most an eighth of a journal may be dead when a server starts
_SLACK_BYTES = 256 << 10  # that may be dead while a server runs, although less is alive
_DELAY_S = 0.05  # so that records are written after the work that made them, several at once
_RETRY_S = 30.0  # after a write that failed or was not allowed
_CLOSE_S = 10.0
_NO_JSON = (ValueError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a journal keeps."""

    values: list[Kept]  # in the order in which they were put
    order: list[str]  # their names, those first whose last use is longest ago


@dataclass(frozen=True, slots=True)
class _Change:
    """A record that is not written yet. `record` makes it on the thread of the journals."""

    record: Callable[[], bytes]
    name: str | None = None  # names the value that it keeps
    num_bytes: int = 0  # in memory


class Journal:
    """Values by name, each with a salt. Threads may share it; none of its methods but `wait` waits for the disk."""

    def __init__(self, journals: "Journals", file: JournalFile):
        self._journals = journals
        self._file = file
        self._lock = threading.Lock()
        self._held: dict[str, tuple[str, int]] = {}  # by name: salt, and bytes in the file, 0 until it is written
        self._num_bytes = 0  # the size of the file
        self._dead_bytes = 0  # the part of them that a compaction frees
        self._has_failed = False
        self._is_restored = threading.Event()

    def __contains__(self, name: str) -> bool:
        """Whether a value is kept, or will be."""
        return name in self._held

    def restore(self, take: Callable[[Restored], None]) -> None:
        """Read the journal on another thread, and give `take` what it keeps. Called once, before anything is put."""
        if not self._journals.soon(partial(self._restore, take)):
            self._is_restored.set()

    def wait(self) -> None:
        """Return once what is kept has been restored."""
        self._is_restored.wait()

    def put(self, name: str, salt: str, value: Callable[[], Any], *, num_bytes: int, base: str | None = None) -> None:
        """Keep a value, in place of one with the same name. `value` gives it as JSON, later and on another thread.

        `num_bytes`: what it holds in memory until then. `base`: a value that counts as used whenever this one does.
        It is not kept if too much waits to be written.
        """
        with self._lock:
            change = _Change(lambda: put_record(name, salt, base, value()), name, max(1, num_bytes))
            if self._journals.add(self, change):
                self._dead_bytes += self._held.get(name, ("", 0))[1]
                self._held[name] = (salt, 0)

    def drop(self, names: Iterable[str]) -> None:
        with self._lock:
            known = [name for name in names if name in self._held]
            self._forget(known)
            if known:
                self._journals.add(self, _Change(partial(drop_record, known)))

    def use(self, names: Iterable[str]) -> None:
        """Values count as used, one after the other, and after each its bases."""
        with self._lock:
            known = [name for name in names if name in self._held]
            if known:
                self._journals.add(self, _Change(partial(use_record, known)))

    def clear(self, salts: str = "") -> None:
        """Drop the values of all salts that begin with `salts`. Nothing of them stays in the file."""
        with self._lock:
            names = {name for name, (salt, _) in self._held.items() if salt.startswith(salts)}
            self._forget(names)
            self._journals.discard(self, names)
            self._journals.soon(partial(self.erase, salts))

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._dead_bytes += self._held.pop(name, ("", 0))[1]

    # -- on the thread of the journals

    def _restore(self, take: Callable[[Restored], None]) -> None:
        try:
            replay = self._read()
            with self._lock:
                found = {name: (kept.salt, len(kept.frame)) for name, kept in replay.values.items()}
                self._held = {**found, **self._held}
                self._dead_bytes = self._num_bytes - replay.num_bytes
            if replay.has_gaps or self._dead_bytes * _START_SHARE > self._num_bytes:
                self._journals.soon(self._compact)
            take(Restored(list(replay.values.values()), list(replay.order)))
        finally:
            self._is_restored.set()

    def _read(self) -> Replay:
        try:
            replay, self._num_bytes = self._file.read()
        except OSError as error:
            self._failed(error)
            return Replay()
        return replay

    def write(self, changes: list[_Change]) -> list[_Change]:
        """Returns the changes that could not be written."""
        rest = changes
        try:
            while rest:
                num_changes = self._write(rest)
                if num_changes == 0:
                    return rest
                rest = rest[num_changes:]
        except OSError as error:
            self._failed(error)
            return rest
        self._has_failed = False
        return rest

    def _write(self, changes: list[_Change]) -> int:
        """Write the first of the changes, and return how many: 0 if nothing may be written now."""
        frames: list[tuple[str | None, bytes]] = []
        num_bytes, num_changes = 0, 0
        for change in changes:
            num_changes += 1
            if (frame := self._frame(change)) is not None:
                frames.append((change.name, frame))
                num_bytes += len(frame)
            if num_bytes * _VALUE_SHARE > self._file.max_bytes:
                break
        if self._num_bytes + num_bytes > self._file.max_bytes:
            self._compact(room=num_bytes)
        is_full = self._num_bytes + num_bytes > self._file.max_bytes
        if is_full or not self._journals.charge(num_bytes):
            return 0
        num_before = self._file.append(b"".join(frame for _, frame in frames))
        self._num_bytes = num_before + num_bytes
        with self._lock:
            self._written(frames, is_new=num_before == 0)
        if self._dead_bytes > max(_SLACK_BYTES, self._num_bytes - self._dead_bytes):
            self._compact()
        return num_changes

    def _frame(self, change: _Change) -> bytes | None:
        """None for a value that cannot be kept."""
        try:
            frame = self._file.frame(change.record())
            if change.name is None or len(frame) * _VALUE_SHARE <= self._file.max_bytes:
                return frame
        except _NO_JSON:
            logger.exception("A value is not kept")
        with self._lock:
            self._forget([] if change.name is None else [change.name])
        return None

    def _written(self, frames: Iterable[tuple[str | None, bytes]], *, is_new: bool) -> None:
        if is_new:  # nothing was kept, or somebody has removed the file
            self._forget([name for name, (_, num_bytes) in self._held.items() if num_bytes])
            self._dead_bytes = 0
        for name, frame in frames:
            if name in self._held:
                salt, num_bytes = self._held[name]
                self._dead_bytes += num_bytes
                self._held[name] = (salt, len(frame))
            else:
                self._dead_bytes += len(frame)

    def erase(self, salts: str) -> None:
        """Write the file without the values of all salts that begin so. If there is no room for that, nothing stays."""
        try:
            self._compacted(self._file.compact(self._journals.charge, clears=salts))
        except OSError as error:
            self._failed(error)
            self._file.path.unlink(missing_ok=True)

    def _compact(self, room: int = 0) -> None:
        try:
            self._compacted(self._file.compact(self._journals.charge, room=room))
        except OSError as error:
            self._failed(error)

    def _compacted(self, replay: Replay | None) -> None:
        if replay is None:
            return
        with self._lock:
            self._forget([name for name, (_, size) in self._held.items() if size and name not in replay.values])
            self._num_bytes = replay.num_bytes
            self._dead_bytes = 0

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning("%s cannot be used now and is tried again: %s", self._file.path, error)
        self._has_failed = True


class Journals:
    """The journals of one folder and the thread that reads and writes them. Any thread may use it."""

    def __init__(
        self,
        folder: Path,
        *,
        cipher: Cipher | None = None,
        charge: Charge = lambda num_bytes: True,
        max_bytes: int = MAX_BYTES,
    ):
        """`charge` is asked before bytes are written. If it refuses, they wait. One journal has at most `max_bytes`."""
        self.charge = charge
        self._folder = folder
        self._cipher = cipher
        self._max_bytes = max_bytes
        self._condition = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque([self._tidy])
        self._waiting: list[tuple[Journal, _Change]] = []
        self._waiting_bytes = 0
        self._write_at_s = 0.0  # by the monotonic clock
        self._opened: dict[str, Journal] = {}  # by name
        self._is_busy = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="journals", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """All journals on disk, those of other checkpoints included."""
        return sum(file.stat().st_size for file in journal_files(self._folder))

    def open(self, kind: str, fingerprint: str = "") -> Journal:
        """The journal of one kind, and of one checkpoint unless what it keeps belongs to none."""
        name = "-".join(part for part in (kind, fingerprint) if part)
        self._opened[name] = Journal(self, self._file(name))
        return self._opened[name]

    def clear(self, salts: str, kinds: Container[str]) -> None:
        """Drop the values of all salts that begin with `salts` from journals of these kinds, of every checkpoint."""
        for name, journal in self._opened.items():
            if _kind(name) in kinds:
                journal.clear(salts)
        self.soon(partial(self._clear_others, salts, kinds))

    def soon(self, job: Callable[[], None]) -> bool:
        """Do something on the thread, before anything else is written. Returns False after the end."""
        with self._condition:
            if self._is_closed:
                return False
            self._jobs.append(job)
            self._condition.notify_all()
            return True

    def add(self, journal: Journal, change: _Change) -> bool:
        """Returns False if too much waits already, or after the end."""
        with self._condition:
            is_full = self._waiting_bytes and self._waiting_bytes + change.num_bytes > MAX_WAITING_BYTES
            if self._is_closed or (change.num_bytes and is_full):
                return False
            if not self._waiting:
                self._write_at_s = time.monotonic() + _DELAY_S
            self._waiting.append((journal, change))
            self._waiting_bytes += change.num_bytes
            self._condition.notify_all()
            return True

    def discard(self, journal: Journal, names: Container[str]) -> None:
        """Do not write the values of these names that wait."""
        with self._condition:
            waiting = [item for item in self._waiting if item[0] is not journal or item[1].name not in names]
            self._waiting = waiting
            self._waiting_bytes = sum(change.num_bytes for _, change in self._waiting)

    def flush(self, timeout_s: float = _CLOSE_S) -> bool:
        """Write what waits. Returns whether nothing waits any more."""
        with self._condition:
            self._write_at_s = 0.0
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_idle or self._write_at_s > time.monotonic() + _DELAY_S, timeout_s)
            return self._is_idle

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write what waits, once more if it failed before, and end the thread."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(timeout_s)

    @property
    def _is_idle(self) -> bool:
        return not (self._waiting or self._jobs or self._is_busy)

    # -- on the thread

    def _run(self) -> None:
        while (work := self._next()) is not None:
            with Fence("the journals, which go on with what is next"):
                work()

    def _next(self) -> Callable[[], None] | None:
        """What to do next, once it is due; None at the end."""
        with self._condition:
            self._is_busy = False
            self._condition.notify_all()
            while True:
                rest_s = self._write_at_s - time.monotonic()
                if self._jobs:
                    self._is_busy = True
                    return self._jobs.popleft()
                if self._waiting and (rest_s <= 0 or self._is_closed):
                    self._is_busy = True
                    waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
                    return partial(self._write, waiting)
                if self._is_closed:
                    return None
                self._condition.wait(rest_s if self._waiting else None)

    def _write(self, waiting: list[tuple[Journal, _Change]]) -> None:
        changes: dict[Journal, list[_Change]] = {}
        for journal, change in waiting:
            changes.setdefault(journal, []).append(change)
        rest = [
            (journal, change)
            for journal, own in changes.items()
            for change in journal.write(own)
            if change.name is None or change.name in journal  # else it was cleared meanwhile
        ]
        with self._condition:
            if rest and not self._is_closed:
                self._waiting = rest + self._waiting
                self._waiting_bytes = sum(change.num_bytes for _, change in self._waiting)
                self._write_at_s = time.monotonic() + _RETRY_S

    def _clear_others(self, salts: str, kinds: Container[str]) -> None:
        for name in names_in(self._folder):
            if name not in self._opened and _kind(name) in kinds:
                Journal(self, self._file(name)).erase(salts)

    def _file(self, name: str) -> JournalFile:
        return JournalFile(self._folder, name, max_bytes=self._max_bytes, cipher=self._cipher)

    def _tidy(self) -> None:
        """Remove the files that were not written for longest, if there are too many."""
        found = sorted(journal_files(self._folder), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in found[MAX_JOURNALS:]:
            if file.name.partition(".")[0] not in self._opened:
                file.unlink(missing_ok=True)


def _kind(name: str) -> str:
    return name.partition("-")[0]
