"""Chooses what of the tree in memory is written to disk, and writes it on a thread of its own, one record at a time.

A path is written once nothing has used it for a while, so that what a later turn cannot contain has left it before. Of
a model that resumes only at states, few states of a path are written: the others would save little.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..disk.folder import Folder, FolderUsage
from ..disk.record import Header, Record, TensorData
from ..disk.space import FolderUnusable, NoRoom
from .disk_arrays import SLAB_TOKENS, Run, Slab, can_store, run_tensors, slabs_of, state_tensors, window_slabs
from .disk_index import DiskIndex, rule_json
from .disk_threads import Owner, Workers
from .index import WORD_BYTES
from .node import Node, ResumeRule
from .snapshot import DamagedSnapshot, KVSegment, RecurrentState
from .stats import DiskReport
from .tree import NEAR_FORK, PrefixTree

logger = logging.getLogger(__name__)

SETTLED_S = 2.0  # a reply's end is trimmed within this time
MAX_SETTLED_S = 20.0
_STATE_BYTES_PER_S = 8e6  # a large state waits longer: the next turn has a newer one, and a disk wears
MAX_RUN_TOKENS = 4096
MAX_RUN_BYTES = 128 << 20  # so that little memory is held by what is being written
_BESIDE_BYTES_PER_S = 100e6  # while rows run, which need the bandwidth of the memory
_LOOK_S = 5.0  # between two looks at the size of the folder
_END_S = 5.0  # the longest wait for the thread at the end
_PAUSE_S = 60.0  # without room, nothing is tried for this time
_STATES_OF_A_PATH = 2  # the newest ones, beside those at forks
_CAP_SLACK = 20  # one part in so many of the cap is removed at once


@dataclass(frozen=True, slots=True)
class _Job:
    leaf: Node
    node: Node  # whose state is written; of a run, the leaf
    header: Header
    tensors: list[TensorData]
    num_bytes: int


class DiskWriter:
    """Belongs to the engine thread, but for the job that writes."""

    def __init__(
        self,
        folder: Folder,
        memory: PrefixTree,
        index: DiskIndex,
        owner: Owner,
        *,
        fingerprint: str,
        rule: ResumeRule,
        s_per_token: float,
        read_bytes_per_s: float,
        max_bytes: int,
    ):
        self._folder, self._memory, self._index, self._owner = folder, memory, index, owner
        self._fingerprint, self._rule = fingerprint, rule
        self._s_per_token, self._read_bytes_per_s = s_per_token, read_bytes_per_s
        self._max_bytes = max_bytes
        self._thread = Workers(1, "disk-write")
        self._job: _Job | None = None
        self._cleared: _Job | None = None  # its state was cleared while it was being written
        self._limit: str | None = None  # why nothing could be written last
        self._is_beside = False  # whether rows run beside the job
        self._paused_until_s = 0.0
        self._usage = FolderUsage(
            used_bytes=0, written_bytes=0, free_bytes=0, excess_bytes=0, num_records=0, other_bytes=0
        )
        self._looked_s = float("-inf")
        self._skipped: dict[int, int] = {}  # node_id of a leaf that is not worth a write -> its end
        self._stated: set[int] = set()  # node_ids whose states were written: what is thinned out is not written again

    @property
    def is_writing(self) -> bool:
        return self._job is not None

    def submit(self, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Run other work on the writer's thread, after what is being written."""
        self._thread.submit(partial(self._owner.attempt, work, failed))

    def next(self, *, is_idle: bool, is_last: bool = False) -> bool:
        """Begin to write the next record, if one is due. `is_last`: the server stops, so that everything is due."""
        self._is_beside = not is_idle
        if self._job is not None or time.monotonic() < self._paused_until_s:
            return False
        for leaf in self._due(is_last=is_last):
            try:
                job = self._plan(leaf)
            except DamagedSnapshot as error:
                logger.warning("Cached state is not written to disk: %s", error)
                job = None
            if job is not None:
                self._job = job
                self.submit(partial(self._write, job), partial(self._not_written, job))
                return True
            self._skipped[leaf.node_id] = leaf.end
        return False

    def _due(self, *, is_last: bool) -> Iterator[Node]:
        """Leaves of this checkpoint that are not on disk and have settled, the longest unused first."""
        now = time.monotonic()
        is_urgent = is_last or self._is_filling
        unwritten = [
            node
            for node in self._memory.nodes()
            if node.key is not None and not node.is_copied and node.space[0] == self._fingerprint
        ]
        ids = {node.node_id for node in unwritten}
        self._skipped = {node_id: end for node_id, end in self._skipped.items() if node_id in ids}
        self._stated &= {node.node_id for leaf in unwritten for node in leaf.path()}
        settled = [
            node
            for node in unwritten
            if (is_urgent or now - node.last_used >= _settled_s(node.state_bytes))
            and self._skipped.get(node.node_id) != node.end
        ]
        yield from sorted(settled, key=lambda node: node.last_used)

    @property
    def _is_filling(self) -> bool:
        """Whether memory will soon evict: what is not written then is lost."""
        return self._memory.used_bytes > 0.85 * self._memory.max_bytes

    def _plan(self, leaf: Node) -> _Job | None:
        """The next record of a path. None: everything worth writing is on disk."""
        key = leaf.key
        assert key is not None
        path = leaf.path()
        end = leaf.end if leaf.resumable_up_to(leaf.end) is not None else leaf.previous_resumable
        states = self._states(path, end, key)
        if self._rule.needs_state:
            end = states[-1].end if states else 0
        elif sum(node.segment_bytes for node in path) >= end * self._bytes_worth_a_token:
            return None
        stored = min(end, self._index.tree.common_length(leaf.space, key))
        for node in states:
            is_due = node.end <= stored and node.node_id not in self._stated
            if is_due and not self._index.has_state(leaf.space, key[: node.end * WORD_BYTES]):
                return self._state_job(leaf, node)
        if stored < end:
            return self._run_job(leaf, path, stored, end)
        if end == leaf.end:
            self._memory.mark_copied(leaf.space, key)
        return None

    @property
    def _bytes_worth_a_token(self) -> float:
        """Bytes that are read in the time in which a token is computed."""
        return self._s_per_token * self._read_bytes_per_s

    def _states(self, path: list[Node], end: int, key: bytes) -> list[Node]:
        """The nodes up to `end` whose states are worth a file: the first, the last ones, and those before forks.

        Reading a state must take less than computing from the one before it.
        """
        stateful = [node for node in path if node.state is not None and node.end <= end]
        forks = [node.end for node in path if node.num_children > 1]
        before_forks = {max((n.end for n in stateful if 0 <= fork - n.end <= NEAR_FORK), default=0) for fork in forks}
        edges = {*before_forks, *(node.end for node in (*stateful[:1], *stateful[-_STATES_OF_A_PATH:]))}
        chosen: list[Node] = []
        for node in stateful:
            if node.end not in edges:
                continue
            before = chosen[-1].end if chosen else 0
            is_stored = self._index.has_state(node.space, key[: node.end * WORD_BYTES])
            if is_stored or node.state_bytes < (node.end - before) * self._bytes_worth_a_token:
                chosen.append(node)
        return chosen

    def _state_job(self, leaf: Node, node: Node) -> _Job | None:
        state, key = node.state, leaf.key
        assert isinstance(state, RecurrentState) and key is not None
        parent = self._index.run_before(leaf.space, key[: node.end * WORD_BYTES])
        if parent is None or not can_store(state.arrays.buffers):
            return None
        layout, tensors = state_tensors(state)
        header = self._header("state", leaf, parent, node.end, b"", layout)
        return _Job(leaf, node, header, tensors, state.nbytes)

    def _run_job(self, leaf: Node, path: list[Node], start: int, end: int) -> _Job | None:
        key = leaf.key
        assert key is not None
        most_tokens = _tokens_in(MAX_RUN_BYTES, path)
        slabs: list[Slab] = []
        nodes: list[Node] = []
        position = start
        for node in path:
            if node.end <= position:
                continue
            if nodes and (nodes[-1].num_children > 1 or position >= start + most_tokens):
                break
            stop = min(node.end, end, start + most_tokens)
            segment = node.segment
            assert isinstance(segment, KVSegment)
            slabs += slabs_of(segment, position - node.start, stop - node.start)
            nodes.append(node)
            position = stop
        windows, window_offset = _windows(nodes, start, position)
        if not all(can_store(slab.stack.buffers) for slab in (*slabs, *windows)):
            return None
        parent = self._index.run_before(leaf.space, key[: start * WORD_BYTES])
        layout, tensors = run_tensors(Run(tuple(slabs), tuple(windows), window_offset))
        header = self._header("run", leaf, parent, start, key[start * WORD_BYTES : position * WORD_BYTES], layout)
        return _Job(leaf, leaf, header, tensors, sum(node.segment_bytes for node in nodes))

    def _header(
        self, kind: Any, leaf: Node, parent: Record | None, start: int, words: bytes, layout: dict[str, Any]
    ) -> Header:
        return Header(
            kind=kind,
            fingerprint=leaf.space[0],
            salt=leaf.space[1],
            parent="" if parent is None else parent.name,
            start=start,
            words=words,
            layout=layout,
            s_per_token=self._s_per_token,
            rule=rule_json(self._rule),
        )

    # -- the job

    def _write(self, job: _Job) -> None:
        """Write a record. Runs on the writer's thread."""
        tensors = [(name, dtype, shape, self._paced(data)) for name, dtype, shape, data in job.tensors]
        record = self._folder.add(job.header, tensors)
        self._owner.post(partial(self._written, job, record))

    def _paced(self, data: Any) -> Iterator[memoryview]:
        for part in data:
            yield part
            if self._is_beside:
                time.sleep(part.nbytes / _BESIDE_BYTES_PER_S)

    def _written(self, job: _Job, record: Record) -> None:
        is_cleared, self._cleared = self._cleared is job, None
        self._job = self._limit = None
        if is_cleared or (record.name not in self._index and not self._index.add(record)):
            self._skipped[job.leaf.node_id] = job.leaf.end  # it would be written again and again
            self.submit(partial(self._folder.remove, record), self._owner.fail)
            return
        if record.header.kind == "state":
            self._stated.add(job.node.node_id)
            self._thin(job.leaf)

    def _thin(self, leaf: Node) -> None:
        """Remove the states of a path that have become worth less than a file since they were written."""
        if leaf.key is not None:
            kept = {node.end for node in self._states(leaf.path(), leaf.end, leaf.key)}
            self._index.tree.thin(leaf.space, leaf.key, keep_last=_STATES_OF_A_PATH, keep=kept)
            self._owner.make_room(0)

    def _not_written(self, job: _Job, error: Exception) -> None:
        self._job = None
        match error:
            case NoRoom(limit="cap" | "free"):
                slack = self._max_bytes // _CAP_SLACK
                if not self._owner.make_room(job.num_bytes + slack):
                    self._pause(error)
            case NoRoom():
                self._pause(error)
            case FolderUnusable():
                self._paused_until_s = time.monotonic() + _PAUSE_S
                self._owner.fail(error)
            case FileNotFoundError():  # another server has removed the record that this one continues
                self._owner.lost([job.header.parent])
            case _:
                self._owner.fail(error)

    def _pause(self, error: NoRoom) -> None:
        """Try again in a minute. The log has one line until something could be written."""
        if error.limit != self._limit:
            logger.warning("%s", error)
        self._limit = error.limit
        self._paused_until_s = time.monotonic() + _PAUSE_S

    # -- what leaves memory or the disk

    def clear(self, salts: str) -> None:
        """What is being written of salts that begin with `salts` is removed as soon as it is complete."""
        if self._job is not None and self._job.header.salt.startswith(salts):
            self._cleared = self._job

    def recheck(self, *, is_lost: bool) -> None:
        """Records are gone, so nodes in memory may be kept nowhere else any more.

        What is lost is written again. What was evicted is not: it was of least worth.
        """
        if is_lost:
            self._skipped.clear()
            self._stated.clear()
        for leaf in [node for node in self._memory.nodes() if node.key is not None]:
            path = leaf.path()
            assert leaf.key is not None
            if leaf.space[0] == self._fingerprint and any(node.is_copied for node in path):
                stored = self._index.tree.common_length(leaf.space, leaf.key)
                for node in path:
                    self._recheck(node, leaf.key[: node.end * WORD_BYTES], stored, is_lost=is_lost)

    def _recheck(self, node: Node, key: bytes, stored: int, *, is_lost: bool) -> None:
        has_state = node.state is None or self._index.has_state(node.space, key)
        if node.is_copied and not (node.end <= stored and has_state):
            node.is_copied = False
            if not is_lost:
                self._skipped[node.node_id] = node.end

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
        return sum(
            node.segment_bytes + node.state_bytes
            for node in self._memory.nodes()
            if node.key is not None and not node.is_copied and self._skipped.get(node.node_id) != node.end
        )

    def close(self) -> None:
        """What was begun is written, and what was removed is removed, unless the disk hangs."""
        self._is_beside = False
        self._thread.close(_END_S)


def _settled_s(state_bytes: int) -> float:
    """How long a path must be unused before it is written."""
    return max(SETTLED_S, min(MAX_SETTLED_S, state_bytes / _STATE_BYTES_PER_S))


def _tokens_in(num_bytes: int, path: list[Node]) -> int:
    """How many tokens of a path fit, in whole slabs."""
    per_token = max(1, sum(node.segment_bytes for node in path) // path[-1].end)
    num_slabs = min(MAX_RUN_TOKENS, num_bytes // per_token) // SLAB_TOKENS
    return SLAB_TOKENS * max(1, num_slabs)


def _windows(nodes: list[Node], start: int, end: int) -> tuple[list[Slab], int]:
    """The window layers' KV that ends at `end` without a gap, and where it begins, counted from `start`."""
    slabs: list[Slab] = []
    first = end
    for node in reversed(nodes):
        segment = node.segment
        assert isinstance(segment, KVSegment)
        low = max(node.window_start, start)
        if not segment.windows.buffers or low >= first:
            break
        slabs[:0] = window_slabs(segment, low - node.start, first - node.start)
        first = low
        if low > node.start:
            break
    return slabs, first - start
