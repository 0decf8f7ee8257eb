"""Chooses which part of a path in memory is worth a file, and describes it as records. It writes none.

Of a model that resumes only at states, few states of a path are written: the others would save little.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..disk.record import Header, TensorData
from .disk_arrays import SLAB_TOKENS, Run, Slab, can_store, run_tensors, slabs_of, state_tensors, window_slabs
from .disk_index import DiskIndex, rule_json
from .index import WORD_BYTES, common_tokens
from .node import Node, ResumeRule, Space
from .snapshot import KVSegment, RecurrentState
from .tree import NEAR_FORK

MAX_RUN_TOKENS = 4096
MAX_RUN_BYTES = 128 << 20  # so that little memory is held by what is being written
_MAX_STATED = 4096
NUM_LAST_STATES = 2  # the newest ones of a path, which are written in addition to those at forks


@dataclass(frozen=True, slots=True)
class Job:
    """A record to write. Its tensors refer to arrays in memory, whose bytes are copied as they are written."""

    node_id: int  # the node whose state it is; or the last node of a run's path
    header: Header
    tensors: list[TensorData]
    num_bytes: int

    def begins_after(self, position: int) -> bool:
        """Whether everything in it belongs to tokens after the first `position`."""
        return self.header.start >= position + (self.header.kind == "state")


@dataclass(eq=False, slots=True)
class Errand:
    """Records of one path that are written one after the other. `jobs` is shared with the thread."""

    leaf_id: int
    space: Space
    key: bytes  # up to the last record's end
    needs_state: bool
    jobs: deque[Job]  # the ones that have not been begun
    points: list[int] = field(init=False)  # positions of its states
    left_bytes: int = field(init=False)  # bytes that are not written yet
    evicted_bytes: int = 0  # bytes that have left the tree since it was planned
    current: Job | None = None  # the last one that was begun
    is_cleared: bool = False

    def __post_init__(self) -> None:
        self.left_bytes = sum(job.num_bytes for job in self.jobs)
        self.points = [job.header.end for job in self.jobs if job.header.kind == "state"]
        self.key = self.key[: self.jobs[-1].header.end * WORD_BYTES]

    @property
    def held_bytes(self) -> int:
        """Memory that is only kept to be written."""
        return min(self.left_bytes, self.evicted_bytes)

    def resume_length(self, key: bytes) -> int:
        """Where a key can resume once all is written; 0 if nothing of it has left memory."""
        if not self.held_bytes:
            return 0
        common = common_tokens(self.key, key)
        return max((point for point in self.points if point <= common), default=0) if self.needs_state else common

    def begin(self) -> Job | None:
        """The next record to write. Called on the thread."""
        try:
            self.current = self.jobs.popleft()
        except IndexError:  # the engine thread may have dropped what was left
            return None
        return self.current

    def drop_last(self) -> bool:
        """Leave the last record unwritten. False if all have been begun."""
        try:
            job = self.jobs.pop()
        except IndexError:
            return False
        self.left_bytes -= job.num_bytes
        self.key = self.key[: job.header.start * WORD_BYTES]
        if job.header.kind == "state":
            self.points.pop()
        return True

    def drop_all(self) -> None:
        while self.drop_last():
            pass


class DiskPlan:
    """Describes records of one checkpoint. `name_of` names the record that has a header."""

    def __init__(
        self,
        index: DiskIndex,
        name_of: Callable[[Header], str],
        *,
        fingerprint: str,
        rule: ResumeRule,
        s_per_token: float,
        read_bytes_per_s: float,
    ):
        self._index, self._name_of = index, name_of
        self._fingerprint, self._rule = fingerprint, rule
        self._s_per_token = s_per_token
        self._bytes_worth_a_token = s_per_token * read_bytes_per_s  # they are read while a token is computed
        # The last node_ids whose states were written: what is thinned out is not written again.
        self._stated: dict[int, None] = {}

    def is_mine(self, node: Node) -> bool:
        return node.space[0] == self._fingerprint

    def note_written(self, job: Job) -> None:
        if job.header.kind == "state":
            self._stated[job.node_id] = None
            if len(self._stated) > _MAX_STATED:
                del self._stated[next(iter(self._stated))]

    def forget_written(self) -> None:
        """Files are gone, so that states may be written again."""
        self._stated.clear()

    def errand(self, leaf: Node, *, up_to: int, most: int | None) -> tuple[int, Errand | None]:
        """Return the end of the part of a path, up to `up_to`, that is worth a file, and its missing records, if any.

        There are at most `most` of them. Raises DamagedSnapshot.
        """
        assert leaf.key is not None
        end, records = self._records(leaf, up_to)
        jobs = deque(islice(records, most))
        return end, Errand(leaf.node_id, leaf.space, leaf.key, self._rule.needs_state, jobs) if jobs else None

    def _records(self, leaf: Node, up_to: int) -> tuple[int, Iterator[Job]]:
        """Each record is described when it is asked for, after the one that it continues."""
        key, path = leaf.key, leaf.path()
        assert key is not None
        end = leaf.end if leaf.resumable_up_to(leaf.end) is not None else leaf.previous_resumable
        states = self.states(path, end, key)
        if self._rule.needs_state:
            states = [node for node in states if node.end <= up_to]
            end = states[-1].end if states else 0
        elif sum(node.segment_bytes for node in path) >= end * self._bytes_worth_a_token:
            end = 0
        if not all(_can_store(node) for node in path):
            end = 0
        return end, self._missing(leaf, path, states, min(end, up_to))

    def states(self, path: list[Node], end: int, key: bytes) -> list[Node]:
        """The nodes up to `end` whose states are worth a file: the first, the last ones, and those before forks.

        Reading a state must take less than computing from the one before it.
        """
        stateful = [node for node in path if node.state is not None and node.end <= end]
        forks = [node.end for node in path if node.num_children > 1]
        before_forks = {max((n.end for n in stateful if 0 <= fork - n.end <= NEAR_FORK), default=0) for fork in forks}
        edges = {*before_forks, *(node.end for node in (*stateful[:1], *stateful[-NUM_LAST_STATES:]))}
        chosen: list[Node] = []
        for node in stateful:
            if node.end not in edges:
                continue
            before = chosen[-1].end if chosen else 0
            is_stored = self._index.has_state(node.space, key[: node.end * WORD_BYTES])
            if is_stored or node.state_bytes < (node.end - before) * self._bytes_worth_a_token:
                chosen.append(node)
        return chosen

    def _missing(self, leaf: Node, path: list[Node], states: list[Node], end: int) -> Iterator[Job]:
        space, key = leaf.space, leaf.key
        assert key is not None
        position = min(end, self._index.tree.common_length(space, key))
        due = [
            node
            for node in states
            if node.end <= end
            and node.node_id not in self._stated
            and not self._index.has_state(space, key[: node.end * WORD_BYTES])
        ]
        for node in due:
            if node.end <= position and (parent := self._index.run_before(space, key[: node.end * WORD_BYTES])):
                yield self._state_job(node, parent.name)
        before = self._index.run_before(space, key[: position * WORD_BYTES])
        name = "" if before is None else before.name
        while position < end:
            job = self._run_job(key, path, name, position, end)
            yield job
            position, name, start = job.header.end, self._name_of(job.header), position
            yield from (self._state_job(node, name) for node in due if start < node.end <= position)

    def _state_job(self, node: Node, parent: str) -> Job:
        state = node.state
        assert isinstance(state, RecurrentState)
        layout, tensors = state_tensors(state)
        return Job(node.node_id, self._header("state", node, parent, node.end, b"", layout), tensors, state.nbytes)

    def _run_job(self, key: bytes, path: list[Node], parent: str, start: int, end: int) -> Job:
        most_tokens = _tokens_in(MAX_RUN_BYTES, path)
        slabs: list[Slab] = []
        nodes: list[Node] = []
        num_bytes, position = 0, start
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
            num_bytes += node.segment_bytes * (stop - position) // (node.end - node.start)
            position = stop
        windows, window_offset = _windows(nodes, start, position)
        layout, tensors = run_tensors(Run(tuple(slabs), tuple(windows), window_offset))
        words = key[start * WORD_BYTES : position * WORD_BYTES]
        return Job(path[-1].node_id, self._header("run", path[-1], parent, start, words, layout), tensors, num_bytes)

    def _header(self, kind: Any, node: Node, parent: str, start: int, words: bytes, layout: dict[str, Any]) -> Header:
        return Header(
            kind=kind,
            fingerprint=node.space[0],
            salt=node.space[1],
            parent=parent,
            start=start,
            words=words,
            layout=layout,
            s_per_token=self._s_per_token,
            rule=rule_json(self._rule),
        )


def _can_store(node: Node) -> bool:
    segment, state = node.segment, node.state
    assert isinstance(segment, KVSegment)
    return can_store(segment.buffers()) and (not isinstance(state, RecurrentState) or can_store(state.arrays.buffers))


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
