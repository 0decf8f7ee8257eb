"""Counts of a prefix tree, and its nodes as plain values for a status page. They hold no cached state."""

from dataclasses import asdict, dataclass, field, fields
from typing import Annotated

from ..core.figure import counter, gauge
from .node import NODE_BYTES, Hit, Node, Space
from .store import NodeStore


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counts since the process started. The tree increments them."""

    hits: dict[Hit, int] = field(default_factory=lambda: {"exact": 0, "prefix": 0, "supersequence": 0, "lcp": 0})
    misses: int = 0
    tokens_saved: int = 0
    # cuts of leaves and removals of states to make room
    evictions: Annotated[int, counter("cache_evictions", "Evictions from the prefix cache.")] = 0
    evicted_bytes: Annotated[int, counter("cache_evicted_bytes", "Bytes freed by evictions from the prefix cache.")] = 0
    inserts: int = 0
    inserts_refused: int = 0  # no room could be made
    inserts_unattached: int = 0  # because the prefix that they continue was no longer stored

    def count_hit(self, hit: Hit, length: int) -> None:
        self.hits[hit] += 1
        self.tokens_saved += length


@dataclass(slots=True, kw_only=True)
class TreeStats(Counters):
    """The counts of one moment, and the sizes of the tree."""

    entry_count: Annotated[int, gauge("cache_paths", "Stored paths in the prefix cache.")]
    num_states: Annotated[int, gauge("cache_states", "Snapshots of recurrent state in the prefix cache.")]
    used_bytes: int
    used_buffers: Annotated[int, gauge("cache_buffers", "Device buffers that the prefix cache holds.")]
    index_bytes: int  # part of used_bytes
    max_bytes: int

    @property
    def num_hits(self) -> int:
        return sum(self.hits.values())


@dataclass(slots=True, kw_only=True)
class DiskReport:
    """The contents and the work of the disk tier. Counts begin when the process starts; the tier increments them.

    `off_reason` is a sentence that says why nothing is read or written. It is None if the tier works.
    """

    folder: str
    off_reason: str | None = None
    used_bytes: Annotated[int, gauge("disk_bytes", "Size of the prefix cache on disk.")] = 0
    max_bytes: Annotated[int, gauge("disk_limit_bytes", "Limit of the prefix cache on disk.")] = 0
    written_today_bytes: Annotated[int, gauge("disk_written_today_bytes", "Bytes written to disk today.")] = 0
    daily_bytes: Annotated[int, gauge("disk_daily_limit_bytes", "Bytes that may be written to disk in a day.")] = 0
    num_records: Annotated[int, gauge("disk_records", "Files of the prefix cache on disk.")] = 0
    num_waiting_bytes: Annotated[int, gauge("disk_waiting_bytes", "State that is to be written to disk.")] = 0
    hits: Annotated[int, counter("disk_hits", "Requests for which cached state was read from disk.")] = 0
    tokens_read: Annotated[int, counter("disk_tokens_read", "Tokens whose state was read from disk.")] = 0
    bytes_read: Annotated[int, counter("disk_bytes_read", "Bytes of state that were read from disk.")] = 0
    reads_not_made: Annotated[
        int, counter("disk_reads_not_made", "Reads from disk that were not made, because computing was faster.")
    ] = 0
    reads_not_used: Annotated[
        int,
        counter(
            "disk_reads_not_used", "Reads from disk after which the prompt resumed before the end of what was read."
        ),
    ] = 0
    num_damaged: Annotated[
        int, counter("disk_damaged_files", "Files that were removed from disk, because they were damaged.")
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One node, as the status page displays it."""

    node_id: int
    parent_id: int | None
    space: Space
    start: int
    end: int
    segment_bytes: int
    state_bytes: int
    window_start: int
    last_used: float
    hits: int
    state_hits: int
    num_children: int
    pins: int


def entry_of(node: Node) -> Entry:
    return Entry(**{own.name: getattr(node, own.name) for own in fields(Entry)})


def tree_stats(store: NodeStore, counters: Counters, *, max_bytes: int) -> TreeStats:
    nodes = list(store.nodes())
    return TreeStats(
        **asdict(counters),
        entry_count=sum(len(paths) for paths in store.spaces.values()),
        num_states=sum(node.state is not None for node in nodes),
        used_bytes=store.used_bytes,
        used_buffers=store.used_buffers,
        index_bytes=sum(len(node.key) for node in nodes if node.key is not None) + NODE_BYTES * len(nodes),
        max_bytes=max_bytes,
    )
