"""Writes what memory keeps of its paths, on a thread of its own, one record at a time.

A path is due a second after a part of it was stored, so that what a later turn cannot contain has left it before. What
is evicted from memory before it was written is lost.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..disk.faults import FolderUnusable, NoRoom
from ..disk.folder import Folder, FolderUsage
from ..disk.record import Record
from .disk_index import DiskIndex
from .disk_plan import DiskPlan, Job
from .disk_threads import Owner, Workers
from .index import WORD_BYTES, common_tokens
from .node import Node, Space
from .snapshot import DamagedSnapshot
from .stats import DiskReport
from .tree import PrefixTree

logger = logging.getLogger(__name__)

SETTLED_S = 1.0  # a reply's end is trimmed within this time
SPARING_S = 60.0  # once half of the day's bytes are written: the next turn replaces some states within this time
_MAX_DUE = 256  # paths that wait; of more, the ones that wait longest are forgotten
_BESIDE_BYTES_PER_S = 100e6  # while rows run, which need the bandwidth of the memory
_LOOK_S = 5.0  # between two looks at the size of the folder
_END_S = 5.0  # the longest wait for the thread at the end
_PAUSE_S = 60.0  # without room, nothing is tried for this time
_CAP_SLACK = 20  # a twentieth of the cap is removed at once

Path = tuple[Space, bytes]


class DiskWriter:
    """Belongs to the engine thread, but for `_write`."""

    def __init__(
        self, folder: Folder, memory: PrefixTree, index: DiskIndex, owner: Owner, plan: DiskPlan, report: DiskReport
    ):
        """`report` has the limits."""
        self._folder, self._memory, self._index, self._owner, self._plan = folder, memory, index, owner, plan
        self._slack_bytes, self._daily_bytes = report.max_bytes // _CAP_SLACK, report.daily_bytes
        self._thread = Workers(1, "disk-write")
        self._due: dict[Path, float] = {}  # when each was stored last, the newest at the end
        self._thins: dict[Path, tuple[int, frozenset[int]]] = {}  # to be done once the path is written
        self._running: Job | None = None
        self._limit: str | None = None  # why nothing could be written last
        self._is_beside = False  # whether rows run that need the bandwidth of the memory
        self._is_making_room = False
        self._is_last = False
        self._paused_until_s = 0.0
        self._usage = FolderUsage(used_bytes=0, written_bytes=0, free_bytes=0, excess_bytes=0, num_records=0)
        self._looked_s = float("-inf")

    @property
    def is_writing(self) -> bool:
        return self._running is not None

    def submit(self, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Run other work on the writer's thread, after what is being written."""
        self._thread.submit(partial(self._owner.attempt, work, failed))

    def stored(self, space: Space, key: bytes) -> None:
        """Memory has stored a part of this path, or all."""
        if space[0] != self._plan.fingerprint:
            return
        for due in [due for due in self._due if due[0] == space and key.startswith(due[1])]:
            self._settle(due)
        self._due[space, key] = time.monotonic()
        if len(self._due) > _MAX_DUE:
            self._settle(next(iter(self._due)))

    def thin(self, space: Space, key: bytes, keep_last: int, keep: Iterable[int]) -> None:
        """Remove states like `PrefixTree.thin`, but the ones that memory keeps, once the path is written.

        So a turn whose server is killed before that has removed nothing.
        """
        if (space, key) in self._due:
            self._thins[space, key] = keep_last, frozenset(keep)

    def _settle(self, path: Path) -> None:
        del self._due[path]
        self._thins.pop(path, None)

    def next(self, *, is_idle: bool, is_last: bool = False) -> bool:
        """Begin to write the next record, if one is due. `is_last`: the server stops, so that everything is due."""
        self._is_beside, self._is_last = not is_idle and not self._is_filling, is_last
        return self._begin()

    def _begin(self) -> bool:
        if self._is_waiting or self._running is not None:
            return False
        latest_s = time.monotonic() - self._settled_s
        for (space, key), stored_s in reversed(list(self._due.items())):
            if stored_s > latest_s:
                continue
            if (job := self._job(space, key)) is not None:
                self._start(job)
                return True
            self._settle((space, key))
        return False

    @property
    def _settled_s(self) -> float:
        """How long ago a path must have been stored to be due."""
        if self._is_last or self._is_filling:
            return 0.0
        return SPARING_S if 2 * self._usage.written_bytes > self._daily_bytes else SETTLED_S

    def _job(self, space: Space, key: bytes) -> Job | None:
        """Return the next record of a path, or None if all that memory has of it is on disk."""
        path = self._path(space, key)
        try:
            job = self._plan.next(path, key)
        except DamagedSnapshot as error:
            logger.warning("Cached state is not written to disk: %s", error)
            return None
        if job is None:
            for node in path:
                node.is_copied = True
            self._thin(space, key, path)
        return job

    def _thin(self, space: Space, key: bytes, path: list[Node]) -> None:
        if (found := self._thins.get((space, key))) is not None:
            keep_last, keep = found
            kept = keep.union(node.end for node in path if node.state is not None)
            self._index.tree.thin(space, key, keep_last=keep_last, keep=kept)
            self._owner.sweep()

    def _path(self, space: Space, key: bytes) -> list[Node]:
        """What memory has of a path, as far as its nodes end there."""
        return [node for node in self._memory.path(space, key) if node.end * WORD_BYTES <= len(key)]

    @property
    def _is_filling(self) -> bool:
        """Whether memory will soon evict."""
        return self._memory.used_bytes > 0.85 * self._memory.max_bytes

    @property
    def _is_waiting(self) -> bool:
        """Whether nothing can be written now: there is no room, or it is being made."""
        return self._is_making_room or time.monotonic() < self._paused_until_s

    # -- the thread

    def _start(self, job: Job) -> None:
        self._running = job
        self.submit(partial(self._write, job), partial(self._not_written, job))

    def _write(self, job: Job) -> None:
        """Write one record. Runs on the writer's thread."""
        record = self._add(job)
        self._look()
        self._owner.post(partial(self._written, job, record))

    def _add(self, job: Job) -> Record:
        """Write one record."""
        tensors = [(name, dtype, shape, self._paced(data)) for name, dtype, shape, data in job.tensors]
        return self._folder.add(job.header, tensors)

    def _paced(self, data: Any) -> Iterator[memoryview]:
        for part in data:
            yield part
            if self._is_beside:
                time.sleep(part.nbytes / _BESIDE_BYTES_PER_S)

    def _written(self, job: Job, record: Record) -> None:
        self._limit = self._running = None
        if record.name not in self._index and (job.is_cleared or not self._index.add(record)):
            self._forget(job)  # it would be written again and again
            self.submit(partial(self._folder.remove, [record]), self._owner.fail)
        self._owner.sweep()
        if self._owner.is_on:
            self._begin()

    def _paths_of(self, job: Job) -> list[Path]:
        return [due for due in self._due if due[0] == job.space and due[1].startswith(job.key)]

    def _forget(self, job: Job) -> None:
        for due in self._paths_of(job):
            self._settle(due)

    def _not_written(self, job: Job, error: Exception) -> None:
        self._running = None
        match error:
            case NoRoom(limit="cap" | "free"):
                self._is_making_room = True
                num_held = self._num_held(job)
                self._owner.make_room(job.num_bytes + self._slack_bytes, partial(self._has_room, error, job, num_held))
            case NoRoom():
                self._pause(error)
            case FolderUnusable():
                self._pause()
                self._owner.fail(error)
            case _:
                self._owner.fail(error)

    def _num_held(self, job: Job) -> int:
        """How many records the disk has of the paths that need this one."""
        return sum(len(self._index.records_on(*due)) for due in self._paths_of(job))

    def _has_room(self, error: NoRoom, job: Job, num_held: int, is_larger: bool) -> None:
        self._is_making_room = False
        if self._num_held(job) < num_held:
            self._forget(job)  # it is larger than the folder may become, and would push its own records out for ever
        if not is_larger:
            self._pause(error)
        elif self._owner.is_on:
            self._begin()

    def _pause(self, error: NoRoom | None = None) -> None:
        """Try again in a minute. The log has one line until something could be written."""
        if error is not None:
            if error.limit != self._limit:
                logger.warning("%s", error)
            self._limit = error.limit
        self._paused_until_s = time.monotonic() + _PAUSE_S

    # -- what leaves memory or the disk

    def clear(self, salts: str) -> None:
        """Forget what waits of salts that begin with `salts`. What is being written is removed once it is complete."""
        for due in [due for due in self._due if due[0][1].startswith(salts)]:
            self._settle(due)
        if self._running is not None and self._running.space[1].startswith(salts):
            self._running.is_cleared = True

    def trim(self, space: Space, key: bytes, keep: int) -> None:
        """Remove the running record once it is complete, if it lies on this path after its first `keep` tokens."""
        job = self._running
        if job is not None and job.space == space and job.begins_after(keep) and common_tokens(job.key, key) > keep:
            job.is_cleared = True

    # -- figures

    def complete(self, report: DiskReport, **counts: Any) -> DiskReport:
        """The figures of the folder are a few seconds old, because a look at all files takes longer than a report."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            self.submit(self._look, self._owner.fail)
        return replace(
            report,
            used_bytes=self._usage.used_bytes,
            written_today_bytes=self._usage.written_bytes,
            num_records=self._usage.num_records,
            num_waiting_bytes=self.num_waiting_bytes(),
            **counts,
        )

    def _look(self) -> None:
        """Runs on the writer's thread."""
        self._usage = self._folder.usage()

    def num_waiting_bytes(self) -> int:
        """Bytes in memory that are to be written."""
        nodes = {node.node_id: node for space, key in self._due for node in self._path(space, key)}
        return sum(node.segment_bytes + node.state_bytes for node in nodes.values() if not node.is_copied)

    def close(self) -> None:
        """What was begun is written, and what was removed is removed, unless the disk hangs."""
        self._is_beside = False
        self._thread.close(_END_S)
