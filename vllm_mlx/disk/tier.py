"""The disk tier below the prefix cache: the reader and the writer of the files, and their index.

Everything here belongs to the engine thread. Other threads read and write files; `tick` takes their results between two
steps. The planner of the cache asks `reader` and tells `writer`, and changes `tree` as it changes the tree in memory.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..cache.node import Node
from ..cache.stats import DiskReport
from ..cache.tree import MemoryAwarePrefixCache
from .folder import Folder
from .reader import Reader
from .store import DiskStore
from .threads import contained
from .writer import Writer

logger = logging.getLogger(__name__)

_END_S = 5.0  # the longest wait for the thread that writes, at the end
_REPORT_S = 5.0  # figures of the folder are at most this old: a look at it takes longer than a report


class DiskTier:
    def __init__(
        self,
        folder: Folder,
        memory: MemoryAwarePrefixCache,
        report: DiskReport,
    ):
        """`memory` is the tree of the engine's cache. `report` has the settings, and gets the counts of reads.

        The first tick reads the index, once all models were added.
        """
        self.store = DiskStore(folder, memory)
        self._threads, self._report = self.store.threads, report
        self.tree = self.store.index.tree  # the records on disk, of all checkpoints and salts
        self.reader = Reader(self.store, report)
        self.writer = Writer(self.store, report)
        self._is_loaded = False
        self._cleared: list[str] = []  # salts that were cleared before the index was read

    @property
    def is_on(self) -> bool:
        """Return whether anything may be written: the tier is not off, its index is read, and it is not closed."""
        return self.store.off_reason is None and not self._threads.is_closed and self._is_loaded

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on any thread, when `tick` has something to do."""
        self._threads.wake = wake

    def tick(self, *, is_idle: bool, is_last: bool = False, wait_s: float = 0.0) -> bool:
        """Collect results of the threads, and begin reads and the next record.

        It waits for the threads no longer than `wait_s`. Returns whether more is to be done immediately. `is_last`:
        the server stops, so everything that is not on disk yet is written.
        """
        if (error := contained(partial(self._tick, is_idle, is_last, wait_s))) is not None:
            self.store.fail(error)
            self.reader.cancel()
        return self._threads.has_news

    def _tick(self, is_idle: bool, is_last: bool, wait_s: float) -> None:
        self._threads.take_news(wait_s)
        if not self._is_loaded and self.store.off_reason is None and not self.store.is_paused:
            self._load()
        self.reader.begin()
        if self.is_on:
            self.writer.begin(is_idle=is_idle, is_last=is_last)
        self.store.sweep()

    def _load(self) -> None:
        self.store.load()
        self._is_loaded = True
        for salts in self._cleared:
            self.store.clear(salts)

    @property
    def is_due_soon(self) -> bool:
        """Return whether `tick` should be called within a fraction of a second, even if nothing else happens."""
        return self.is_on and self.writer.is_due_soon

    @property
    def is_written(self) -> bool:
        """Return whether nothing waits to be written, or nothing can be written now."""
        return not self.is_on or not (self.writer.is_writing or self.writer.is_due_soon)

    def free_memory(self, fingerprint: str) -> None:
        """Remove state of a model from memory if it is on disk."""
        memory = self.store.memory
        own = [node for node in memory.store.nodes() if node.space[0] == fingerprint]
        for leaf, key in [(node, node.key) for node in own if node.key is not None]:
            node: Node | None = leaf
            while node is not None and node.is_copied:
                node = node.parent
            if self.tree.common_length(leaf.space, key) >= leaf.end:
                memory.trim(leaf.space, key, 0 if node is None else node.end)

    def write_all(self, rest_s: Callable[[], float]) -> None:
        """Write state that is not on disk yet, while `rest_s` returns a time. Called by the engine at a clean stop."""
        while self.is_on and (left_s := rest_s()) > 0:
            wait_s = min(0.1, left_s) if self.writer.is_writing else 0.0
            if not self.tick(is_idle=True, is_last=True, wait_s=wait_s) and not self.writer.is_writing:
                break
        if self.is_on and (left := self.writer.num_waiting_bytes):
            logger.warning("%d bytes of cached state were not written to disk before the end", left)

    def clear(self, salts: str = "") -> None:
        """Remove all files of salts that begin with `salts` soon, even while they are read or written."""
        if not self._is_loaded:
            self._cleared.append(salts)
        self.reader.cancel(salts)
        self.writer.clear(salts)
        self.store.clear(salts)

    def close(self) -> None:
        """End the threads. Nothing more is read or written, but unused files are removed. The folder stays open."""
        self.reader.cancel()
        self.store.sweep()
        self._threads.close(_END_S)

    def report(self) -> DiskReport:
        usage = self.writer.usage_since(_REPORT_S)
        return replace(
            self._report,
            off_reason=self.store.off_reason,
            used_bytes=0 if usage is None else usage.used_bytes,
            written_today_bytes=0 if usage is None else usage.written_bytes,
            num_records=0 if usage is None else usage.num_records,
            num_waiting_bytes=self.writer.num_waiting_bytes,
            num_damaged=len(self.store.folder.damages),
        )
