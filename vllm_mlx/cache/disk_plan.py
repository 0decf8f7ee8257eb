"""Finds what a path in memory has and the disk lacks, and describes it as a record. It writes none.

The disk mirrors what memory keeps of a path: a node is one record with its windows, and a second one for its state. So
no rule of its own decides what a restarted server can resume from.
"""

from dataclasses import dataclass
from typing import Any, Literal

from ..disk.record import Header, TensorData
from .disk_arrays import SLAB_TOKENS, Run, can_store, run_tensors, slabs_of, state_tensors, window_slabs
from .disk_index import DiskIndex, rule_json
from .index import WORD_BYTES
from .node import Node, ResumeRule, Space
from .snapshot import KVSegment, RecurrentState

MAX_RUN_TOKENS = 4096
MAX_RUN_BYTES = 128 << 20  # so that little memory is held by what is being written


@dataclass(eq=False, slots=True)
class Job:
    """A record to write. Its tensors refer to arrays in memory, whose bytes are copied as they are written."""

    key: bytes  # up to the record's end
    header: Header
    tensors: list[TensorData]
    num_bytes: int
    is_cleared: bool = False  # it is removed once it is complete

    @property
    def space(self) -> Space:
        return (self.header.fingerprint, self.header.salt)

    def begins_after(self, position: int) -> bool:
        """Whether everything in it belongs to tokens after the first `position`."""
        return self.header.start >= position + (self.header.kind == "state")


class DiskPlan:
    """Describes records of one checkpoint."""

    def __init__(self, index: DiskIndex, *, fingerprint: str, rule: ResumeRule, s_per_token: float):
        self._index = index
        self.fingerprint, self._rule = fingerprint, rule
        self._s_per_token = s_per_token

    def next(self, path: list[Node], key: bytes) -> Job | None:
        """The first record that the disk lacks of a path in memory, whose key this is. Raises DamagedSnapshot."""
        if not path or not all(_can_store(node) for node in path):
            return None
        stored = self._index.tree.path(path[-1].space, key)
        common = self._index.tree.common_length(path[-1].space, key)
        states = {node.end for node in stored if node.state is not None}
        for node in path:
            if (span := self._lacking(node, stored, common)) is not None:
                return self._run_job(node, key, *span)
            if node.state is not None and node.end not in states:
                return self._state_job(node, key)
        return None

    def _lacking(self, node: Node, stored: list[Node], common: int) -> tuple[int, int] | None:
        """The first tokens of a node that the disk lacks, or has without their windows."""
        if self._rule.window is not None:
            for part in stored:
                low, high = max(part.start, node.window_start), min(part.window_start, node.end, common)
                if low < high:
                    return low, high
        return (max(node.start, common), node.end) if common < node.end else None

    def _state_job(self, node: Node, key: bytes) -> Job:
        state = node.state
        assert isinstance(state, RecurrentState)
        layout, tensors = state_tensors(state)
        return self._job("state", node, key, node.end, node.end, layout, tensors, state.nbytes)

    def _run_job(self, node: Node, key: bytes, start: int, end: int) -> Job:
        segment, length = node.segment, node.end - node.start
        assert isinstance(segment, KVSegment)
        end = min(end, start + _tokens_in(MAX_RUN_BYTES, node))
        windowed = min(max(node.window_start, start), end)
        run = Run(
            tuple(slabs_of(segment, start - node.start, end - node.start)),
            tuple(window_slabs(segment, windowed - node.start, end - node.start)) if windowed < end else (),
            windowed - start,
        )
        layout, tensors = run_tensors(run)
        num_bytes = node.segment_bytes * (end - start) // length
        return self._job("run", node, key, start, end, layout, tensors, num_bytes)

    def _job(
        self,
        kind: Literal["run", "state"],
        node: Node,
        key: bytes,
        start: int,
        end: int,
        layout: dict[str, Any],
        tensors: list[TensorData],
        num_bytes: int,
    ) -> Job:
        before = self._index.run_before(node.space, key[: start * WORD_BYTES])
        header = Header(
            kind=kind,
            fingerprint=node.space[0],
            salt=node.space[1],
            parent="" if before is None else before.name,
            start=start,
            words=key[start * WORD_BYTES : end * WORD_BYTES],
            layout=layout,
            s_per_token=self._s_per_token,
            rule=rule_json(self._rule),
        )
        return Job(key[: end * WORD_BYTES], header, tensors, num_bytes)


def _can_store(node: Node) -> bool:
    segment, state = node.segment, node.state
    assert isinstance(segment, KVSegment)
    return can_store(segment.buffers()) and (not isinstance(state, RecurrentState) or can_store(state.arrays.buffers))


def _tokens_in(num_bytes: int, node: Node) -> int:
    """How many tokens of a node fit, in whole slabs."""
    per_token = max(1, node.segment_bytes // (node.end - node.start))
    num_slabs = min(MAX_RUN_TOKENS, num_bytes // per_token) // SLAB_TOKENS
    return SLAB_TOKENS * max(1, num_slabs)
