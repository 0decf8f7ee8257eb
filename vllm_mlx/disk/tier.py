"""The disk tier below the prefix cache: its index, and what reads and writes the files.

Everything here belongs to the engine thread. Other threads read and write files; what they have done is taken in by
`tick`, between two steps.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from threading import Event

from ..cache.index import num_tokens
from ..cache.node import ResumeRule, Space
from ..cache.stats import DiskReport, Entry
from ..cache.tree import PrefixTree
from ..core.faults import device_fault
from .faults import FolderUnusable, NoRoom
from .folder import Folder
from .index import DiskIndex
from .reader import Reader
from .record import Record
from .removal import Removal
from .threads import Threads, contained
from .writer import Writer

logger = logging.getLogger(__name__)

_LOAD_S = 10.0  # the longest wait for the index at start
_END_S = 5.0  # the longest wait for the thread that writes, at the end
_BATCH = 64  # records that are added to the index at a time
_NOTE_S = 60.0  # a record's last use is noted at most so often
_REPORT_S = 5.0  # figures of the folder are so old at most: a look at all files takes longer than a report


class DiskTier:
    def __init__(
        self,
        folder: Folder,
        memory: PrefixTree,
        *,
        fingerprint: str,
        rule: ResumeRule,
        s_per_token: float,
        read_bytes_per_s: float,
        report: DiskReport,
        clock: Callable[[], float] = time.time,
    ):
        """`memory`: the tree of the engine's cache. `s_per_token`: what computing a token of its model takes.

        `read_bytes_per_s`: the speed of the disk before the first reads were measured.

        `report` has the settings; `DiskTier.report` adds what happens.
        """
        self._folder = folder
        self._settings = report
        self._clock = clock
        self._threads = Threads()
        self._index = DiskIndex()
        self._index.add_model(fingerprint, rule, s_per_token)
        self._removal = Removal(folder, self._index, lambda work: self._threads.write(work, self.fail))
        parts = (self._threads, folder, memory, self._index, self._removal, self.fail)
        self._reader = Reader(
            *parts, rule=rule, s_per_token=s_per_token, read_bytes_per_s=read_bytes_per_s, clock=clock
        )
        self._writer = Writer(*parts, fingerprint=fingerprint, rule=rule, s_per_token=s_per_token, report=report)
        self._noted: set[str] = set()  # names of records whose use was noted since `_noted_s`
        self._noted_s = 0.0
        self._off_reason: str | None = None
        self._fault: Exception | None = None  # what the device met
        self._is_missing = False  # whether the folder could not be used when it was needed last
        self._cleared: list[str] = []  # salts that were cleared before all records were known
        self._loaded = Event()

    # -- the index at start

    def load(self) -> None:
        """Begin to read the index, and wait for it a while, so that the first request finds what there is."""
        self._threads.read(self._scan, self._scan_failed)
        deadline = time.monotonic() + _LOAD_S
        while not self._loaded.is_set() and (rest_s := deadline - time.monotonic()) > 0:
            self.tick(is_idle=True, wait_s=min(0.1, rest_s))

    def _scan(self) -> None:
        """Read all rows. Runs on a reader's thread."""
        batch: list[Record] = []
        for record in self._folder.scan():
            batch.append(record)
            if len(batch) == _BATCH:
                self._threads.post(partial(self._add, batch))
                batch = []
            if self._threads.is_closed:
                return
        self._threads.post(partial(self._add, batch))
        self._threads.post(self._end_of_scan)

    def _scan_failed(self, error: Exception) -> None:
        self.fail(error)
        self._end_of_scan()

    def _add(self, records: Iterable[Record]) -> None:
        self._removal.remove(record for record in records if not self._index.add(record))

    def _end_of_scan(self) -> None:
        self._index.age()
        self._loaded.set()
        for salts in self._cleared:
            self.clear(salts)
        logger.info("The cache on disk has %d records", len(self._index))

    # -- what the engine does between two steps

    @property
    def is_on(self) -> bool:
        """Whether anything may be written: it is not off, all records are known, and it has not ended."""
        return self._off_reason is None and not self._threads.is_closed and self._loaded.is_set()

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when `tick` has something to do."""
        self._threads.wake = wake

    def tick(self, *, is_idle: bool, is_last: bool = False, wait_s: float = 0.0) -> bool:
        """Take in what the threads have done, begin reads and the next record, and remove a little.

        It waits for the threads no longer than `wait_s`, and only if nothing else is to be done. Returns whether more
        is to be done at once. `is_last`: the server stops, so that all that is not on disk yet is written.
        """
        if (error := contained(partial(self._tick, is_idle, is_last, wait_s))) is not None:
            self.fail(error)
        return self._removal.is_busy or self._threads.has_news

    def _tick(self, is_idle: bool, is_last: bool, wait_s: float) -> None:
        self._removal.advance()
        self._threads.take_news(0.0 if self._removal.is_busy else wait_s)
        self._reader.begin()
        if self.is_on:
            self._writer.begin(is_idle=is_idle, is_last=is_last)
        self._removal.sweep()

    def fail(self, error: Exception | None) -> None:
        """Note what failed; None: the folder works. If it is only missing or full, the tier stays on."""
        if error is None:
            self._is_missing = False
            return
        if device_fault(error) is not None:
            self._fault = error
        elif isinstance(error, FolderUnusable | NoRoom):
            if not self._is_missing:
                logger.warning("%s", error)
            self._is_missing = True
            return
        elif self._off_reason is None:
            self._off_reason = f"An error turned it off: {type(error).__name__}: {error}."
            logger.error("The cache on disk is off: %s", self._off_reason, exc_info=error)
        self._reader.cancel()

    @property
    def is_due_soon(self) -> bool:
        """Whether `tick` should be called within a fraction of a second, also if nothing else happens."""
        return self.is_on and self._writer.is_due_soon

    def raise_fault(self) -> None:
        """Raise the device fault that a tick met, if any did."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def write_all(self, rest_s: Callable[[], float]) -> None:
        """Write what is not on disk yet, while `rest_s` returns a time. Called on the engine thread at a clean stop."""
        while self.is_on and (wait_s := rest_s()) > 0:
            is_busy = self.tick(is_idle=True, is_last=True)
            if not is_busy and not self._writer.is_writing:
                break
            self.tick(is_idle=True, is_last=True, wait_s=min(0.1, wait_s))
        if self.is_on and (left := self._writer.num_waiting_bytes):
            logger.warning("%d bytes of cached state were not written to disk before the end", left)

    def close(self) -> None:
        """End the threads. Nothing is read or written any more; what is to be removed is."""
        self._reader.cancel()
        while self._removal.is_busy:
            self._removal.advance()
        self._removal.sweep()
        self._threads.close(_END_S)
        self._folder.close()

    # -- what the planner asks and tells

    @property
    def reserved_bytes(self) -> int:
        """Memory that running reads will take."""
        return self._reader.reserved_bytes

    @property
    def reading(self) -> frozenset[int]:
        """The seq_ids of sequences whose state is being read."""
        return self._reader.reading

    def awaits(self, seq_id: int, space: Space, key: bytes) -> bool:
        """Whether a sequence should wait, because its prefix is being read. The first call asks for the read."""
        return self._off_reason is None and self._reader.awaits(seq_id, space, key)

    def forget(self, seq_id: int) -> None:
        """The sequence has ended. What is being read for it is dropped."""
        self._reader.forget(seq_id)

    def resumed(self, seq_id: int, space: Space, key: bytes) -> int:
        """Note that a sequence resumes at the key's end in memory: its files should outlive it there.

        Returns how many tokens were read for it.
        """
        if key:
            self._use(space, key)
        return self._reader.resumed(seq_id, num_tokens(key))

    def _use(self, space: Space, key: bytes) -> None:
        now = self._clock()
        self._index.tree.touch(space, key, now=now)
        if now - self._noted_s > _NOTE_S:
            self._noted_s = now
            self._noted.clear()
        new = [record for record in self._index.records_on(space, key) if record.name not in self._noted]
        if new:
            self._noted.update(record.name for record in new)
            self._threads.write(partial(self._folder.note_use, new, now), self.fail)

    def common_length(self, space: Space, key: bytes) -> int:
        """Number of tokens in the longest prefix on disk, resumable or not."""
        return self._index.tree.common_length(space, key)

    def stored(self, space: Space, key: bytes) -> None:
        """Write this path soon: memory has stored a part of it, or all."""
        self._writer.stored(space, key)

    def trim(self, space: Space, key: bytes, keep: int) -> None:
        """Remove what no later turn can use, like `PrefixTree.trim`."""
        self._writer.trim(space, key, keep)
        self._index.tree.trim(space, key, keep)

    def thin(self, space: Space, key: bytes, *, keep_last: int, keep: Iterable[int]) -> None:
        """Remove states that a growing conversation no longer needs, once its new ones are written."""
        self._writer.thin(space, key, keep_last, keep)

    def drop_state(self, space: Space, key: bytes) -> None:
        """Remove the state at the key's end, like `PrefixTree.drop_state`."""
        self._index.tree.drop_state(space, key)

    def drop(self, space: Space, key: bytes) -> None:
        """Remove the path that was restored and cannot be used."""
        self._index.tree.drop(space, key)

    def clear(self, salts: str = "") -> None:
        """Remove all files of salts that begin with `salts`, soon, also what is being read or written."""
        if not self._loaded.is_set():
            self._cleared.append(salts)
        self._reader.cancel(salts)
        self._writer.clear(salts)
        self._removal.clear(salts)

    # -- figures

    def entries(self) -> list[Entry]:
        return list(self._index.tree.entries())

    def report(self) -> DiskReport:
        usage, reader = self._writer.usage_since(_REPORT_S), self._reader
        return replace(
            self._settings,
            off_reason=self._off_reason,
            used_bytes=0 if usage is None else usage.used_bytes,
            written_today_bytes=0 if usage is None else usage.written_bytes,
            num_records=0 if usage is None else usage.num_records,
            num_waiting_bytes=self._writer.num_waiting_bytes,
            hits=reader.num_hits,
            tokens_read=reader.num_tokens,
            bytes_read=reader.num_bytes,
            reads_not_made=reader.num_not_made,
            reads_not_used=reader.num_short,
            num_damaged=len(self._folder.damages),
        )
