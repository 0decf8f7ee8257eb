"""The folder of the cache on disk and the index of its records, which are changed together.

The reader and the writer of the tier share it and the threads that work on the folder, and report faults here.
"""

import logging
import time
from functools import partial

from ..cache.tree import MemoryAwarePrefixCache
from ..util.faults import device_fault
from .faults import FolderUnusable, NoRoom
from .folder import Folder
from .index import DiskIndex
from .record import Record
from .threads import Threads

logger = logging.getLogger(__name__)

PAUSE_S = 60.0  # after a fault of the folder, nothing is written for this time


class DiskStore:
    """Belongs to the engine thread."""

    def __init__(self, folder: Folder, memory: MemoryAwarePrefixCache):
        """`memory` is the tree of the engine's cache, which knows the rule and the speed of each model."""
        self.folder, self.memory = folder, memory
        self.threads = Threads()
        self.index = DiskIndex()
        self.off_reason: str | None = None
        self._device_fault: Exception | None = None
        self._said: object = None  # the kind of the last fault in the log, until something is written
        self._paused_until_s = 0.0
        self._num_removals = 0  # removals that the writing thread has not done yet

    def add_model(self, fingerprint: str, name: str) -> None:
        """Keep the state of a model that the tree in memory has. Called before the tier's first tick."""
        self.folder.note_model(fingerprint, name)
        self.index.add_model(fingerprint, self.memory.rule(fingerprint), self.memory.s_per_token(fingerprint))

    # -- the content of the folder

    def load(self) -> None:
        """Read the index of the folder."""
        self.remove([record for record in self.folder.scan() if not self.index.add(record)])
        self.index.age()
        logger.info("The cache on disk has %d records", len(self.index))

    def add(self, record: Record) -> bool:
        """Add a record that was written. One that nothing can use is removed; returns False then."""
        is_added = self.index.add(record)
        if not is_added:
            self.remove([record])
        return is_added

    def sweep(self) -> int:
        """Remove the files that nothing uses any more. Returns their bytes."""
        return self.remove(self.index.unused())

    def make_room(self, num_bytes: int) -> int:
        """Remove records, the least valuable first, until `num_bytes` are free. Returns the freed bytes."""
        tree = self.index.tree
        self.index.drop_repeated()
        freed_bytes = self.sweep()
        while freed_bytes < num_bytes and (held := tree.used_bytes) > tree.shrink_to(held + freed_bytes - num_bytes):
            freed_bytes += self.sweep()  # a file goes with the last of its parts
        return freed_bytes

    def clear(self, salts: str) -> None:
        """Remove the state of all salts that begin with `salts`."""
        self.index.drop_repeated()
        self.index.tree.detach(salts=salts)
        self.sweep()
        self.threads.write(self.folder.database.shorten, self.fail)

    @property
    def is_removing(self) -> bool:
        """Return whether files are about to be removed, so that the folder is smaller than it looks."""
        return self._num_removals > 0

    def remove(self, records: list[Record]) -> int:
        """Remove the files of records. Returns their bytes."""
        if records:
            self._num_removals += 1
            self.threads.write(partial(self._remove_files, records), self.fail)  # before the next record is written
        return sum(record.file_bytes for record in records)

    def _remove_files(self, records: list[Record]) -> None:
        """Remove the files. Runs on the thread that writes."""
        try:
            self.folder.remove(records)
        finally:
            self.threads.post(self._removed)

    def _removed(self) -> None:
        self._num_removals -= 1

    # -- faults

    def fail(self, error: Exception) -> None:
        """Log a fault, once. A folder that is missing or full is tried again in a minute."""
        if device_fault(error) is not None:
            self._device_fault = error
        elif isinstance(error, FolderUnusable | NoRoom):
            kind = (type(error), getattr(error, "limit", None))
            if kind != self._said:
                logger.warning("%s", error)
            self._said, self._paused_until_s = kind, time.monotonic() + PAUSE_S
        elif self.off_reason is None:
            self.off_reason = f"An error turned it off: {type(error).__name__}: {error}."
            logger.error("The cache on disk is off: %s", self.off_reason, exc_info=error)

    def works(self) -> None:
        """Note that something was written, so that the log names the next fault."""
        self._said = None

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until_s

    def raise_fault(self) -> None:
        """Raise the device fault that was met, if any was."""
        fault, self._device_fault = self._device_fault, None
        if fault is not None:
            raise fault
