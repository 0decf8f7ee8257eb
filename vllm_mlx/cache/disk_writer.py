"""Writes the parts of the tree in memory that are worth a file, on a thread of its own, one record at a time.

A path is written once nothing has used it for a while, so that what a later turn cannot contain has left it before.
What is evicted from memory before that is written too: it waits in a queue, as far as memory has room for it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from ..disk.folder import Folder, FolderUsage
from ..disk.record import Record
from ..disk.space import FolderUnusable, NoRoom
from .disk_index import DiskIndex
from .disk_plan import NUM_LAST_STATES, DiskPlan, Errand, Job
from .disk_threads import Owner, Workers
from .index import WORD_BYTES, common_tokens, num_tokens
from .node import Node, Space
from .snapshot import DamagedSnapshot
from .stats import DiskReport
from .tree import PrefixTree

logger = logging.getLogger(__name__)

SETTLED_S = 2.0  # a reply's end is trimmed within this time
MAX_SETTLED_S = 20.0
_STATE_BYTES_PER_S = 8e6  # a large state waits longer: the next turn has a newer one, and a disk wears
_BESIDE_BYTES_PER_S = 100e6  # while rows run, which need the bandwidth of the memory
_LOOK_S = 5.0  # between two looks at the size of the folder
_END_S = 5.0  # the longest wait for the thread at the end
_PAUSE_S = 60.0  # without room, nothing is tried for this time
LOOKED = 32  # leaves at which one look for due ones looks
_CAP_SLACK = 20  # a twentieth of the cap is removed at once


class DiskWriter:
    """Belongs to the engine thread, but for `_write`."""

    def __init__(
        self,
        folder: Folder,
        memory: PrefixTree,
        index: DiskIndex,
        owner: Owner,
        plan: DiskPlan,
        *,
        max_bytes: int,
    ):
        self._folder, self._memory, self._index, self._owner, self._plan = folder, memory, index, owner, plan
        self._slack_bytes = max_bytes // _CAP_SLACK
        self._thread = Workers(1, "disk-write")
        self._running: Errand | None = None
        self._queue: deque[Errand] = deque()  # what was evicted
        self._room_bytes = 0  # memory for what is in the queue
        self._limit: str | None = None  # why nothing could be written last
        self._is_beside = False  # whether rows run that need the bandwidth of the memory
        self._is_making_room = False
        self._paused_until_s = 0.0
        self._usage = FolderUsage(
            used_bytes=0, written_bytes=0, free_bytes=0, excess_bytes=0, num_records=0, num_others=0, other_bytes=0
        )
        self._looked_s = float("-inf")

    @property
    def is_writing(self) -> bool:
        return self._running is not None or bool(self._queue)

    @property
    def held_bytes(self) -> int:
        """Memory of what was evicted and is not written yet."""
        return sum(errand.held_bytes for errand in self._errands())

    def submit(self, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Run other work on the writer's thread, after what is being written."""
        self._thread.submit(partial(self._owner.attempt, work, failed))

    def next(self, *, is_idle: bool, is_last: bool = False) -> bool:
        """Begin to write the next record, if one is due. `is_last`: the server stops, so that everything is due."""
        if self._is_waiting or self._running is not None:
            return False
        self._is_beside = not is_idle and not self._is_filling
        if self._queue:
            self._start(self._queue.popleft())
            return True
        for leaf in self._due(is_last=is_last):
            if (errand := self._errand(leaf, most=1)) is not None:
                self._start(errand)
                return True
            self._memory.changed.settle(leaf.node_id)
        return False

    def _due(self, *, is_last: bool) -> Iterator[Node]:
        """Leaves of this checkpoint that have changed since they were written, and have settled.

        A call looks at a few, in the order in which they changed; the others come later.
        """
        now, changed = time.monotonic(), self._memory.changed
        for leaf in list(islice(changed, None if is_last else LOOKED)):
            if leaf.is_copied or not self._plan.is_mine(leaf):
                changed.settle(leaf.node_id)
            elif is_last or self._is_filling or now - leaf.last_used >= _settled_s(leaf.state_bytes):
                yield leaf
            else:
                changed.note(leaf)  # it is looked at after the others

    @property
    def _is_filling(self) -> bool:
        """Whether memory will soon evict."""
        return self._memory.used_bytes > 0.85 * self._memory.max_bytes

    @property
    def _is_waiting(self) -> bool:
        """Whether nothing can be written now: there is no room, or it is being made."""
        return self._is_making_room or time.monotonic() < self._paused_until_s

    def _errand(self, leaf: Node, *, up_to: int | None = None, most: int | None = None) -> Errand | None:
        """The next records of a path up to `up_to`, at most `most`. None: everything worth writing is on disk."""
        try:
            end, errand = self._plan.errand(leaf, up_to=leaf.end if up_to is None else up_to, most=most)
        except DamagedSnapshot as error:
            logger.warning("Cached state is not written to disk: %s", error)
            return None
        if errand is None and end == leaf.end and leaf.key is not None:
            self._memory.mark_copied(leaf.space, leaf.key)
        return errand

    # -- what is evicted from memory

    def set_room(self, num_bytes: int) -> None:
        """Limit the memory of what was evicted and is not written yet. What exceeds it is lost."""
        self._room_bytes = num_bytes
        while self.held_bytes > num_bytes and any(errand.drop_last() for errand in reversed(self._errands())):
            pass
        self._queue = deque(errand for errand in self._queue if errand.jobs)

    @contextmanager
    def leaving(self, node: Node, leaf: Node) -> Iterator[None]:
        """Use it around an eviction of a node on the path of `leaf`: what is worth a file and has none joins the queue.

        Nothing is copied: the records refer to arrays that never change, and keep them until they are written.
        """
        errand, before = self._hand_over(node, leaf), self._memory.used_bytes
        try:
            yield
        finally:
            if errand is not None:
                errand.evicted_bytes += before - self._memory.used_bytes
                self.set_room(self._room_bytes)
                self._start_queued()

    def _hand_over(self, node: Node, leaf: Node) -> Errand | None:
        is_known = node.is_copied or (node is leaf and leaf not in self._memory.changed)
        if is_known or self._is_waiting or not self._plan.is_mine(node) or self.held_bytes >= self._room_bytes:
            return None
        assert leaf.key is not None
        key = leaf.key[: node.end * WORD_BYTES]
        for errand in self._errands():
            if errand.space == leaf.space and errand.key.startswith(key):
                return errand
        if (made := self._errand(leaf, up_to=node.end)) is not None:
            self._queue.append(made)
        return made

    def resume_length(self, space: Space, key: bytes) -> int:
        """Where a key can resume once what was evicted is on disk; 0 if nothing of it waits to be written."""
        return max((errand.resume_length(key) for errand in self._errands() if errand.space == space), default=0)

    def _errands(self) -> list[Errand]:
        return [*([] if self._running is None else [self._running]), *self._queue]

    # -- the thread

    def _start(self, errand: Errand) -> None:
        self._running = errand
        self.submit(partial(self._write, errand), partial(self._not_written, errand))

    def _start_queued(self) -> bool:
        if self._running is not None or not self._queue or self._is_waiting:
            return False
        self._is_beside = False  # memory waits for it
        self._start(self._queue.popleft())
        return True

    def _write(self, errand: Errand) -> None:
        """Write records, until all are written or one fails. Runs on the writer's thread."""
        while (job := errand.begin()) is not None:
            record = self._add(job)
            self._owner.post(partial(self._written, errand, job, record))
        self._owner.post(self._ended)

    def _add(self, job: Job) -> Record:
        """Write one record. If it lacks room, records that nobody can use here go first, then others of this server."""
        tensors = [(name, dtype, shape, self._paced(data)) for name, dtype, shape, data in job.tensors]
        try:
            return self._folder.add(job.header, tensors)
        except NoRoom as error:  # it is raised before anything is written, except if the disk itself is full
            if error.limit not in ("cap", "free") or not self._folder.remove_others(job.num_bytes + self._slack_bytes):
                raise
            return self._folder.add(job.header, tensors)

    def _paced(self, data: Any) -> Iterator[memoryview]:
        for part in data:
            yield part
            if self._is_beside:
                time.sleep(part.nbytes / _BESIDE_BYTES_PER_S)

    def _written(self, errand: Errand, job: Job, record: Record) -> None:
        self._limit = None
        errand.left_bytes -= job.num_bytes
        if errand.is_cleared or (record.name not in self._index and not self._index.add(record)):
            errand.drop_all()
            self._memory.changed.settle(errand.leaf_id)  # it would be written again and again
            self.submit(partial(self._folder.remove, record), self._owner.fail)
            return
        self._plan.note_written(job)
        if record.header.kind == "state":
            self._thin(errand.space, errand.key)

    def _thin(self, space: Space, key: bytes) -> None:
        """Remove the states of a path that have become worth less than a file since they were written."""
        path = self._memory.path(space, key)
        if path and path[-1].end == num_tokens(key):
            kept = {node.end for node in self._plan.states(path, path[-1].end, key)}
            self._index.tree.thin(space, key, keep_last=NUM_LAST_STATES, keep=kept)
            self._owner.sweep()

    def _ended(self) -> None:
        self._running = None
        if self._owner.is_on and not self._start_queued() and self._is_filling:
            self.next(is_idle=False)

    def _not_written(self, errand: Errand, error: Exception) -> None:
        self._running = None
        job = errand.current
        assert job is not None
        match error:
            case NoRoom(limit="cap" | "free"):
                errand.jobs.appendleft(job)
                self._queue.appendleft(errand)
                self._is_making_room = True
                self._owner.make_room(job.num_bytes + self._slack_bytes, partial(self._has_room, error))
            case NoRoom():
                self._pause(error)
            case FolderUnusable():
                self._pause()
                self._owner.fail(error)
            case FileNotFoundError():  # another server has removed the record that this one continues
                self._owner.lost([job.header.parent])
            case _:
                self._owner.fail(error)
        if self._owner.is_on:
            self._start_queued()

    def _has_room(self, error: NoRoom, is_larger: bool) -> None:
        self._is_making_room = False
        if not is_larger:
            self._pause(error)
        elif self._owner.is_on:
            self._start_queued()

    def _pause(self, error: NoRoom | None = None) -> None:
        """Try again in a minute; what waits is lost. The log has one line until something could be written."""
        if error is not None:
            if error.limit != self._limit:
                logger.warning("%s", error)
            self._limit = error.limit
        self._paused_until_s = time.monotonic() + _PAUSE_S
        self.drop()

    # -- what leaves memory or the disk

    def drop(self) -> None:
        """Give up what waits to be written, and let the sequences that wait for it look again."""
        self._queue.clear()
        self._owner.post(_nothing)

    def clear(self, salts: str) -> None:
        """Drop what waits of salts that begin with `salts`. What is being written is removed once it is complete."""
        for errand in self._errands():
            if errand.space[1].startswith(salts):
                errand.drop_all()
                errand.is_cleared = True

    def trim(self, space: Space, key: bytes, keep: int) -> None:
        """Drop records of this path that are not written yet and begin after its first `keep` tokens."""
        for errand in self._errands():
            if errand.space == space and common_tokens(errand.key, key) > keep:
                while errand.jobs and errand.jobs[-1].begins_after(keep) and errand.drop_last():
                    pass

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
        """Bytes in memory that are not on disk, although they may be worth it."""
        return self.held_bytes + sum(
            node.segment_bytes + node.state_bytes
            for node in self._memory.changed
            if not node.is_copied and self._plan.is_mine(node)
        )

    def close(self) -> None:
        """What was begun is written, and what was removed is removed, unless the disk hangs."""
        self._is_beside = False
        self._thread.close(_END_S)


def _nothing() -> None:
    """News that only wake the engine."""


def _settled_s(state_bytes: int) -> float:
    """How long a path must be unused before it is written."""
    return max(SETTLED_S, min(MAX_SETTLED_S, state_bytes / _STATE_BYTES_PER_S))
