"""The disk tier below the prefix cache: its index, and what reads and writes the files.

Everything here belongs to the engine thread. Other threads read and write files; they put what they have done into
`_news`, which the engine thread takes in between two steps.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event

from ..core.faults import device_fault
from ..core.fence import Fence
from ..disk.faults import FolderUnusable
from ..disk.folder import Folder
from ..disk.record import Record
from .disk_index import DiskIndex
from .disk_plan import DiskPlan
from .disk_reader import DiskReader
from .disk_removal import DiskRemoval
from .disk_writer import DiskWriter
from .node import ResumeRule, Space
from .stats import DiskReport, Entry
from .tree import PrefixTree

logger = logging.getLogger(__name__)

_LOAD_S = 10.0  # the longest wait for the index at start
_BATCH = 64  # records that are added to the index at a time
_NOTE_S = 60.0  # a record's last use is noted at most so often
_COMPARE_S = 30.0  # between two looks at whether too much is kept


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

        `report` has the settings; `DiskTier.report` adds what happens.
        """
        self._folder = folder
        self._settings = report
        self._clock = clock
        self._noted: set[str] = set()  # names of records whose use was noted since `_noted_s`
        self._noted_s = 0.0
        self._index = DiskIndex()
        self._index.add_model(fingerprint, rule, s_per_token)
        speeds = {"read_bytes_per_s": read_bytes_per_s, "s_per_token": s_per_token}
        plan = DiskPlan(self._index, fingerprint=fingerprint, rule=rule, s_per_token=s_per_token)
        self._reader = DiskReader(folder, memory, self._index, self, clock=clock, **speeds)
        self._writer = DiskWriter(folder, memory, self._index, self, plan, report)
        self._removal = DiskRemoval(folder, self._index, lambda work: self._writer.submit(work, self.fail))
        self.wake: Callable[[], None] = _nobody_waits  # called on any thread when there are news
        self._news: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._off_reason: str | None = None
        self._fault: Exception | None = None  # what the device met in a read
        self._is_missing = False  # whether the folder could not be used when it was needed last
        self._is_closed = False
        self._compared_s = float("-inf")
        self._cleared: list[str] = []  # salts that were cleared before all records were known
        self._loaded = Event()
        memory.read_bytes_per_s = read_bytes_per_s

    # -- the index at start

    def load(self) -> None:
        """Begin to read the headers of the folder's records."""
        self._reader.submit(self._scan, self._scan_failed)

    def await_load(self, timeout_s: float = _LOAD_S) -> None:
        """Wait for the index, so that the first request finds what there is. Called on the engine thread."""
        deadline = time.monotonic() + timeout_s
        while not self._loaded.is_set() and (rest_s := deadline - time.monotonic()) > 0:
            self.take_news(min(0.1, rest_s))

    def _scan(self) -> None:
        """Read all headers. Runs on a reader's thread."""
        batch: list[Record] = []
        for record in self._folder.scan():
            batch.append(record)
            if len(batch) == _BATCH:
                self.post(partial(self._add, batch))
                batch = []
            if self._is_closed:
                return
        self.post(partial(self._add, batch))
        self.post(self._end_of_scan)

    def _scan_failed(self, error: Exception) -> None:
        self.fail(error)
        self._end_of_scan()

    def _add(self, records: Iterable[Record]) -> None:
        for record in records:
            if not self._index.add(record):
                self._removal.remove([record])

    def _end_of_scan(self) -> None:
        self._index.age()
        self._loaded.set()
        for salts in self._cleared:
            self.clear(salts)
        logger.info("The cache on disk has %d records", len(self._index))

    # -- news

    def take_news(self, timeout_s: float = 0.0) -> None:
        """Take in what the threads have done, without waiting longer than `timeout_s` for it."""
        self.advance()
        timeout_s = 0.0 if self.is_busy else timeout_s
        while True:
            try:
                act = self._news.get(timeout_s > 0, timeout_s)
            except Empty:
                return
            self._contain(act)
            del act  # what it refers to is not kept until the next one comes
            timeout_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether `advance` has something to do."""
        return self._removal.is_busy

    def advance(self) -> None:
        """Do a small part of the long tasks. Called between two steps."""
        self._contain(self._removal.advance)

    def _contain(self, work: Callable[[], object]) -> None:
        if (error := _error_of(work)) is not None:
            self.fail(error)

    def attempt(self, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Run work of another thread. `failed` is called on the engine thread if it raises an error."""
        if (error := _error_of(work)) is not None:
            self.post(partial(failed, error))

    def post(self, act: Callable[[], None]) -> None:
        self._news.put(act)
        self.wake()

    # -- reads: the sequences that wait

    @property
    def is_on(self) -> bool:
        """Whether anything may be read or written: it is not off, all records are known, and it has not ended."""
        return self._off_reason is None and not self._is_closed and self._loaded.is_set()

    @property
    def reserved_bytes(self) -> int:
        """Memory that running reads will take."""
        return self._reader.reserved_bytes

    @property
    def reading(self) -> frozenset[int]:
        """The seq_ids of sequences whose state is being read."""
        return self._reader.reading

    def awaits(self, seq_id: int, space: Space, key: bytes) -> bool:
        """Whether a sequence should wait, because its prefix is being read. The first call begins the read."""
        answers: list[bool] = []
        if self._off_reason is None:
            self._contain(lambda: answers.append(self._reader.awaits(seq_id, space, key)))
        return any(answers)

    def num_read(self, seq_id: int) -> int:
        """Tokens that were read for this sequence."""
        return self._reader.num_read(seq_id)

    def forget(self, seq_id: int) -> None:
        """The sequence has ended. What is being read for it is dropped."""
        self._reader.forget(seq_id)

    # -- writes, and what leaves the disk

    def write(self, *, is_idle: bool) -> None:
        """Begin to write the next piece of settled state, if there is any. Called between two steps."""
        if self.is_on:
            self._contain(partial(self._write, is_idle=is_idle))

    def _write(self, *, is_idle: bool) -> None:
        self.sweep()
        now = time.monotonic()
        if now - self._compared_s >= _COMPARE_S:
            self._compared_s = now
            self._writer.submit(self._compare, self.fail)
        self._writer.next(is_idle=is_idle)

    def write_all(self, rest_s: Callable[[], float]) -> None:
        """Write what is not on disk yet, while `rest_s` returns a time. Called on the engine thread at a clean stop."""
        if not self.is_on:
            return
        while (wait_s := rest_s()) > 0 and self._off_reason is None:
            if not self._writer.is_writing and not self._writer.next(is_idle=True, is_last=True) and not self.is_busy:
                break
            self.take_news(min(0.1, wait_s))
        if left := self._writer.num_waiting_bytes():
            logger.warning("%d bytes of cached state were not written to disk before the end", left)

    def use(self, space: Space, key: bytes) -> None:
        """Note that a prefix was used, in memory too: its files should outlive it there."""
        now = self._clock()
        self._index.tree.touch(space, key, now=now)
        if now - self._noted_s > _NOTE_S:
            self._noted_s = now
            self._noted.clear()
        new = [record for record in self._index.records_on(space, key) if record.name not in self._noted]
        if new:
            self._noted.update(record.name for record in new)
            self._writer.submit(partial(self._folder.note_use, new, now), self.fail)

    def common_length(self, space: Space, key: bytes) -> int:
        """Number of tokens in the longest prefix on disk, resumable or not."""
        return self._index.tree.common_length(space, key)

    def stored(self, space: Space, key: bytes) -> None:
        """Write this path soon: memory has stored a part of it, or all."""
        self._writer.stored(space, key)

    def trim(self, space: Space, key: bytes, keep: int) -> None:
        """Remove what no later turn can use, like `PrefixTree.trim`."""
        self._writer.trim(space, key, keep)
        self._contain(partial(self._index.tree.trim, space, key, keep))
        self.sweep()

    def thin(self, space: Space, key: bytes, *, keep_last: int, keep: Iterable[int]) -> None:
        """Remove states that a growing conversation no longer needs, once its new ones are written."""
        self._writer.thin(space, key, keep_last, keep)

    def drop_state(self, space: Space, key: bytes) -> None:
        """Remove the state at the key's end, like `PrefixTree.drop_state`."""
        self._contain(partial(self._index.tree.drop_state, space, key))
        self.sweep()

    def drop(self, space: Space, key: bytes) -> None:
        """Remove the path that was restored and cannot be used."""
        self._contain(partial(self._index.tree.drop, space, key))
        self.sweep()

    def clear(self, salts: str = "") -> None:
        """Remove all files of salts that begin with `salts`, soon, also what is being read or written."""
        if not self._loaded.is_set():
            self._cleared.append(salts)
        self._reader.cancel(salts)
        self._writer.clear(salts)
        self._removal.clear(salts)

    def make_room(self, num_bytes: int, then: Callable[[bool], None]) -> None:
        """Remove the files of least worth, so that `num_bytes` more fit. `then` gets whether anything was removed."""
        self._removal.make_room(num_bytes, then)

    def sweep(self) -> None:
        """Remove the files that no longer contain anything in use."""
        self._removal.sweep()

    def lose(self, records: Iterable[Record]) -> None:
        """Remove records that cannot be used, and what continues them."""
        records = list(records)
        self._removal.remove(records)
        self.lost(record.name for record in records)

    def lost(self, names: Iterable[str]) -> None:
        """Forget records whose files are gone, and remove what continues them."""
        self._removal.lost(names)

    def _compare(self) -> None:
        """Check whether the folder can be used, and whether it holds too much. Runs on the writer's thread."""
        usage = self._folder.usage()
        self.post(self._works)
        if usage.excess_bytes:
            self.post(partial(self.make_room, usage.excess_bytes, _nobody_hears))

    # -- the state of the tier

    def fail(self, error: Exception) -> None:
        """Note that something failed. The tier stays on if only the folder is missing, because it may come back."""
        if device_fault(error) is not None:
            self._fault = error
            self._reader.cancel()
        elif isinstance(error, FolderUnusable):
            if not self._is_missing:
                logger.warning("%s", error)
            self._is_missing = True
        else:
            logger.exception("The cache on disk failed", exc_info=error)
            self.turn_off(f"An error turned it off: {type(error).__name__}: {error}.")

    def _works(self) -> None:
        if self._is_missing:
            logger.info("The cache on disk can be used again")
        self._is_missing = False

    def raise_fault(self) -> None:
        """Raise the device fault that a read met, if any did."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def turn_off(self, reason: str) -> None:
        if self._off_reason is None:
            logger.warning("The cache on disk is off: %s", reason)
            self._off_reason = reason
        self._reader.cancel()

    def entries(self) -> list[Entry]:
        return list(self._index.tree.entries())

    def report(self) -> DiskReport:
        return self._writer.complete(
            self._settings,
            off_reason=self._off_reason,
            hits=self._reader.num_hits,
            tokens_read=self._reader.num_tokens,
            bytes_read=self._reader.num_bytes,
            reads_not_made=self._reader.num_not_made,
            num_damaged=len(self._folder.damages),
        )

    def close(self) -> None:
        """End the threads. Nothing is read or written any more; what is to be removed is."""
        while self.is_busy:
            self.advance()
        self.sweep()
        self._is_closed = True
        self._reader.close()
        self._writer.close()
        self._folder.close()


def _error_of(work: Callable[[], object]) -> Exception | None:
    with Fence("the server, which goes on without what is on disk", is_logged=False) as fence:
        work()
    return fence.error


def _nobody_hears(_: bool) -> None:
    """Stand in for what `make_room` calls."""


def _nobody_waits() -> None:
    """Stand in for `wake` until it is set."""
