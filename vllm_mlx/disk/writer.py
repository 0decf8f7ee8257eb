"""Writes the paths that memory keeps, on a separate thread, one record at a time.

The disk mirrors what memory keeps of a path: a node is one record with its windows, and a second one for its state. So
a restarted server can resume at the same points. A path is due half a second after a part of it was stored, because by
then the tokens that no later turn can contain are removed from it. State that is evicted from memory before it was
written is lost.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..cache.index import WORD_BYTES
from ..cache.node import Node, Space
from ..cache.snapshot import KVSegment, RecurrentState
from ..cache.stats import DiskReport
from .arrays import SLAB_TOKENS, run_tensors, state_tensors
from .faults import Damaged, NoRoom
from .files import size_of
from .folder import FolderUsage
from .index import space_of
from .record import Header, Record, TensorData
from .store import DiskStore

SETTLED_S = 0.5  # the end of a reply is trimmed within this time, and is on disk a second after it was stored
SPARING_S = 60.0  # the same, once half of the day's bytes are written: the next turn replaces some states
_MAX_RUN_TOKENS = 4096
_MAX_RUN_BYTES = 128 << 20  # so that little memory is held while it is written
_MAX_DUE = 256  # waiting paths; beyond it, the ones that wait longest are forgotten
_BESIDE_BYTES_PER_S = 100e6  # while rows run, which need the bandwidth of the memory
_LOOK_S = 30.0  # between two looks at the size of the folder
_CAP_SLACK = 20  # a twentieth of the cap is removed in one go

Path = tuple[Space, bytes]


@dataclass(eq=False, slots=True)
class Job:
    """A record to write. Its tensors refer to arrays in memory, whose bytes are copied as they are written."""

    key: bytes  # the path up to the record's end
    header: Header
    tensors: list[TensorData]
    is_cleared: bool = False  # the record is removed once it is complete


class Writer:
    """Belongs to the engine thread. Only `_write` and `_paced` run on another one."""

    def __init__(self, store: DiskStore, report: DiskReport):
        """`report` has the limits."""
        self._store, self._memory, self._index = store, store.memory, store.index
        self._slack_bytes, self._daily_bytes = report.max_bytes // _CAP_SLACK, report.daily_bytes
        self._due: dict[Path, float] = {}  # when each was stored last, the newest at the end
        self._thins: dict[Path, tuple[int, frozenset[int]]] = {}  # to be done once the path is written
        self._running: Job | None = None
        self._is_beside = False  # whether rows run that need the bandwidth of the memory
        self._usage: FolderUsage | None = None  # at the last look
        self._looked_s = float("-inf")

    @property
    def is_writing(self) -> bool:
        return self._running is not None

    @property
    def is_due_soon(self) -> bool:
        """Return whether something waits that can be written."""
        return bool(self._due) and not self._store.is_paused

    # -- paths that are due

    def stored(self, space: Space, key: bytes) -> None:
        """Note that memory has stored this path, or a part of it."""
        for due in [due for due in self._due if due[0] == space and key.startswith(due[1])]:
            self._settle(due)
        self._due[space, key] = time.monotonic()
        if len(self._due) > _MAX_DUE:
            self._settle(next(iter(self._due)))

    def thin(self, space: Space, key: bytes, *, keep_last: int, keep: Iterable[int]) -> None:
        """Remove states like `MemoryAwarePrefixCache.thin`, but the ones that memory keeps, once the path is written.

        So a turn whose server is killed before that has removed nothing.
        """
        if (space, key) in self._due:
            self._thins[space, key] = keep_last, frozenset(keep)

    def _settle(self, path: Path) -> None:
        del self._due[path]
        self._thins.pop(path, None)

    def begin(self, *, is_idle: bool, is_last: bool = False) -> None:
        """Begin to write the next record, if one is due. `is_last`: the server stops, so that everything is due."""
        self._is_beside = not is_idle and not self._is_filling
        self.usage_since(_LOOK_S)
        if self._store.is_paused or self._running is not None:
            return
        latest_s = time.monotonic() - (0.0 if is_last or self._is_filling else self._settled_s)
        for (space, key), stored_s in reversed(list(self._due.items())):
            if stored_s > latest_s:
                continue
            if (job := self._next(space, key)) is not None:
                self._running = job
                self._store.threads.write(partial(self._write, job), partial(self._not_written, job))
                return
            self._settle((space, key))

    @property
    def _is_filling(self) -> bool:
        """Return whether memory will soon evict."""
        return self._memory.used_bytes > 0.85 * self._memory.max_bytes

    @property
    def _settled_s(self) -> float:
        """Return the age, in seconds, from which a stored path is due."""
        written_bytes = 0 if self._usage is None else self._usage.written_bytes
        return SPARING_S if 2 * written_bytes > self._daily_bytes else SETTLED_S

    # -- the next record of a path

    def _next(self, space: Space, key: bytes) -> Job | None:
        """Return the next record of a path, or None if its whole state in memory is on disk."""
        path = self._path(space, key)
        job = self._lacking(path, space, key)
        if job is None:
            for node in path:
                node.is_copied = True
            if (found := self._thins.get((space, key))) is not None:
                kept = found[1].union(node.end for node in path if node.state is not None)
                self._index.tree.thin(space, key, keep_last=found[0], keep=kept)
        return job

    def _path(self, space: Space, key: bytes) -> list[Node]:
        """Return the nodes of a path in memory that do not reach beyond the key."""
        return [node for node in self._memory.path(space, key) if node.end * WORD_BYTES <= len(key)]

    def _lacking(self, path: list[Node], space: Space, key: bytes) -> Job | None:
        stored, common = self._index.tree.path(space, key), self._index.tree.common_length(space, key)
        states = {node.end for node in stored if node.state is not None}
        for node in path:
            if (span := self._span(node, stored, common)) is not None:
                return self._run_job(node, key, *span)
            if node.state is not None and node.end not in states:
                assert isinstance(node.state, RecurrentState)
                return self._job("state", node, key, node.end, node.end, *state_tensors(node.state))
        return None

    def _span(self, node: Node, stored: list[Node], common: int) -> tuple[int, int] | None:
        """Return the first tokens of a node that the disk lacks, or has without their windows."""
        if self._memory.rule(node.space[0]).window is not None:
            for part in stored:
                low, high = max(part.start, node.window_start), min(part.window_start, node.end, common)
                if low < high:
                    return low, high
        return (max(node.start, common), node.end) if common < node.end else None

    def _run_job(self, node: Node, key: bytes, start: int, end: int) -> Job:
        segment, length = node.segment, node.end - node.start
        assert isinstance(segment, KVSegment)
        most = min(_MAX_RUN_TOKENS, _MAX_RUN_BYTES * length // max(length, node.segment_bytes))
        end = min(end, start + max(1, most // SLAB_TOKENS) * SLAB_TOKENS)
        windowed = min(max(node.window_start, start), end)
        tensors = run_tensors(segment, *(position - node.start for position in (start, end, windowed)))
        return self._job("run", node, key, start, end, *tensors)

    def _job(
        self,
        kind: Literal["run", "state"],
        node: Node,
        key: bytes,
        start: int,
        end: int,
        layout: dict[str, Any],
        tensors: list[TensorData],
    ) -> Job:
        header = Header(
            kind=kind,
            fingerprint=node.space[0],
            salt=node.space[1],
            parent=self._index.run_before(node.space, key[: start * WORD_BYTES]),
            start=start,
            words=key[start * WORD_BYTES : end * WORD_BYTES],
            layout=layout,
            s_per_token=self._memory.s_per_token(node.space[0]),
            rule=self._memory.rule(node.space[0]),
        )
        return Job(key[: end * WORD_BYTES], header, tensors)

    # -- the thread

    def _write(self, job: Job) -> None:
        """Write one record. Runs on the writer's thread."""
        tensors = [(name, dtype, shape, self._paced(data)) for name, dtype, shape, data in job.tensors]
        record = self._store.folder.add(job.header, tensors)
        self._store.threads.post(partial(self._written, job, record, self._store.folder.usage()))

    def _paced(self, data: Any) -> Iterator[memoryview]:
        for part in data:
            yield part
            if self._is_beside and not self._store.threads.is_closed:
                time.sleep(part.nbytes / _BESIDE_BYTES_PER_S)

    def _written(self, job: Job, record: Record, usage: FolderUsage) -> None:
        self._running = None
        self._store.works()
        if job.is_cleared:
            self._store.remove([record])
        elif not self._store.add(record):
            self._forget(job)  # else it would be written again and again
        self._looked(usage)

    def _not_written(self, job: Job, error: Exception) -> None:
        self._running = None
        match error:
            case NoRoom(limit="cap" | "free"):
                num_held = self._num_held(job)
                if not self._store.make_room(size_of(job.tensors) + self._slack_bytes):
                    self._store.fail(error)
                if self._num_held(job) < num_held:
                    self._forget(job)  # else a path larger than the folder evicts its own records again and again
            case Damaged():  # the folder was removed, or its database emptied
                self._index.lose(job.header.parent)
            case _:
                self._store.fail(error)

    def _paths_of(self, job: Job) -> list[Path]:
        return [due for due in self._due if due[0] == space_of(job.header) and due[1].startswith(job.key)]

    def _num_held(self, job: Job) -> int:
        """Count the records on disk of the paths that need this one."""
        return sum(len(self._index.stored_on(*due)) for due in self._paths_of(job))

    def _forget(self, job: Job) -> None:
        for due in self._paths_of(job):
            self._settle(due)

    # -- state that leaves memory or the disk

    def clear(self, salts: str) -> None:
        """Forget waiting paths of salts that begin with `salts`. A record being written is removed at its end."""
        for due in [due for due in self._due if due[0][1].startswith(salts)]:
            self._settle(due)
        if self._running is not None and self._running.header.salt.startswith(salts):
            self._running.is_cleared = True

    # -- figures

    def usage_since(self, age_s: float) -> FolderUsage | None:
        """Return the size of the folder at the last look, and look again soon if that is older."""
        if time.monotonic() - self._looked_s > age_s:
            self._looked_s = time.monotonic()
            self._store.threads.write(self._look, self._store.fail)
        return self._usage

    def _look(self) -> None:
        """Look at the size of the folder. Runs on the thread that writes."""
        self._store.threads.post(partial(self._looked, self._store.folder.usage()))

    def _looked(self, usage: FolderUsage) -> None:
        """Note the size of the folder, and make it smaller if it is too large."""
        self._usage, self._looked_s = usage, time.monotonic()
        if usage.excess_bytes and not self._store.is_removing:
            self._store.make_room(usage.excess_bytes)

    @property
    def num_waiting_bytes(self) -> int:
        """Return the bytes in memory that are to be written."""
        nodes = {node.node_id: node for space, key in self._due for node in self._path(space, key)}
        return sum(node.segment_bytes + node.state_bytes for node in nodes.values() if not node.is_copied)
