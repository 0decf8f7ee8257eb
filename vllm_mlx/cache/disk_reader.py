"""Reads state from disk for sequences that wait, and inserts it into the tree in memory.

A read is made if the disk holds a deeper resume point than memory does, and reading is faster than computing. The
sequence waits for it in the queue, while other rows go on. Then it resumes from memory like any other.

The files are read on threads of their own, straight into arrays that the engine thread has made between two steps.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import mlx.core as mx

from ..disk.faults import Damaged
from ..disk.folder import Folder
from ..disk.record import Record, Tensor
from .disk_arrays import Key, Part, empty_arrays, segment_of, state_of
from .disk_index import DiskIndex
from .disk_threads import Owner, Workers
from .index import WORD_BYTES, common_tokens, num_tokens
from .node import Match, Space
from .snapshot import DamagedSnapshot, KVSegment, RecurrentState
from .tree import PrefixTree

logger = logging.getLogger(__name__)

_READ_S = 0.005  # what a read takes in addition to its bytes: it is queued, and the sequence waits for a step to end
_AHEAD_BYTES = 256 << 20  # arrays that are made before they are read: a disk reads less in a step of other rows
_MADE_BYTES = 32 << 20  # arrays that are made at a time
_NUM_READERS = 2
_MALFORMED = (
    DamagedSnapshot,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)  # raised by layouts that this program did not write


@dataclass(eq=False, slots=True, kw_only=True)
class _Reading:
    """A read that one sequence waits for."""

    seq_id: int
    key: bytes  # ends at the resume point
    space: Space
    match: Match  # pinned in the index
    start: int  # position of the first token that is read
    parts: tuple[Part, ...]
    state: Record | None
    loads: tuple[tuple[Record, int], ...]  # the tensors to read, as a record and an index, in the order of the files
    num_gained: int  # tokens beyond what memory holds
    num_bytes: int = field(init=False)  # bytes to read
    current: Record | None = None  # the record that is being read
    arrays: dict[Key, mx.array] = field(default_factory=dict)
    empty: SimpleQueue[tuple[mx.array, memoryview] | None] = field(default_factory=SimpleQueue)  # arrays to fill
    num_made: int = 0  # arrays were made for the first ones of `loads`
    ahead_bytes: int = 0  # arrays that were made and have not arrived yet
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.num_bytes = sum(record.tensors[index].nbytes for record, index in self.loads)


class DiskReader:
    """Belongs to the engine thread, but for `_read`."""

    def __init__(
        self,
        folder: Folder,
        memory: PrefixTree,
        index: DiskIndex,
        owner: Owner,
        *,
        read_bytes_per_s: float,
        s_per_token: float,
        clock: Callable[[], float],
    ):
        self._folder, self._memory, self._index, self._owner = folder, memory, index, owner
        self._read_bytes_per_s, self._s_per_token = read_bytes_per_s, s_per_token
        self._clock = clock
        self._threads = Workers(_NUM_READERS, "disk-read")
        self._readings: dict[int, _Reading] = {}  # by seq_id
        self._read_tokens: dict[int, int] = {}  # by seq_id: 0 where nothing was read
        self._is_closed = False
        self.num_hits = self.num_tokens = self.num_bytes = self.num_not_made = 0

    def submit(self, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Run other work on one of the threads."""
        self._threads.submit(partial(self._owner.attempt, work, failed))

    def close(self) -> None:
        self._is_closed = True
        self.cancel()
        self._threads.close(0.0)

    def cancel(self, salts: str = "") -> None:
        """Drop what is being read of salts that begin with `salts`. The sequences compute it."""
        for reading in list(self._readings.values()):
            if reading.space[1].startswith(salts):
                self._end(reading)

    @property
    def reserved_bytes(self) -> int:
        """Memory that running reads will take."""
        return sum(reading.num_bytes for reading in self._readings.values())

    @property
    def reading(self) -> frozenset[int]:
        """The seq_ids of sequences whose state is being read."""
        return frozenset(self._readings)

    def awaits(self, seq_id: int, space: Space, key: bytes) -> bool:
        """Whether a sequence should wait, because its prefix is being read. The first call begins the read."""
        if seq_id in self._readings:
            return True
        if self._is_closed or seq_id in self._read_tokens:
            return False
        if any(self._overlap(reading, space, key) for reading in self._readings.values()):
            return True
        self._read_tokens[seq_id] = 0
        reading = self._plan(seq_id, space, key)
        if reading is None:
            return False
        self._readings[seq_id] = reading
        self._memory.set_limit(self._memory.max_bytes - reading.num_bytes)  # what is being read takes this room
        self.submit(partial(self._read, reading), partial(self._read_failed, reading))
        self._make_arrays(reading)
        return True

    def _overlap(self, reading: _Reading, space: Space, key: bytes) -> bool:
        """Whether a running read brings more of this key than memory holds."""
        if reading.space != space:
            return False
        return common_tokens(reading.key, key) > self._memory.common_length(space, key)

    def num_read(self, seq_id: int) -> int:
        """Tokens that were read for this sequence."""
        return self._read_tokens.get(seq_id, 0)

    def forget(self, seq_id: int) -> None:
        """The sequence has ended. What is being read for it is dropped."""
        self._read_tokens.pop(seq_id, None)
        if seq_id in self._readings:
            self._end(self._readings[seq_id])

    def _end(self, reading: _Reading) -> None:
        """What has arrived is dropped, and the room that it would have taken is free again."""
        if self._readings.pop(reading.seq_id, None) is not None:
            self._memory.set_limit(self._memory.max_bytes + reading.num_bytes)
        reading.is_cancelled = True
        reading.empty.put(None)
        self._index.tree.release(reading.match)
        reading.arrays.clear()

    def _plan(self, seq_id: int, space: Space, key: bytes) -> _Reading | None:
        """What to read for the key. None if memory holds as much, computing is faster, or memory has no room."""
        length = self._index.tree.resume_length(space, key)
        held = self._memory.resume_length(space, key)
        if length <= held:
            return None
        match = self._index.tree.match(space, key, now=self._clock())
        try:
            reading = self._reading(seq_id, key[: length * WORD_BYTES], match, length - held)
        except _MALFORMED as error:
            self._index.tree.release(match)
            self._drop(match, error)
            return None
        seconds = _READ_S + reading.num_bytes / self._read_bytes_per_s
        if seconds >= reading.num_gained * self._s_per_token:
            self.num_not_made += 1
        elif self._memory.make_room(reading.num_bytes):
            if self._memory.common_length(space, key) >= reading.start:
                return reading
            self._index.tree.release(match)
            return self._plan(seq_id, space, key)  # the room was made where the read begins
        self._index.tree.release(match)
        return None

    def _reading(self, seq_id: int, key: bytes, match: Match, num_gained: int) -> _Reading:
        """Read what memory lacks of the KV, and of the windows at the resume point."""
        end, space = match.length, match.space
        start = min(self._memory.common_length(space, key), end - 1)
        window = self._index.window_of(space[0])
        first_windowed = end if window is None else max(0, end - window)
        start = min(start, first_windowed)
        parts = []
        for piece in match.pieces:
            low, high = max(piece.start, start), piece.start + piece.take
            if low < high:
                at = piece.segment.first - piece.start  # type: ignore[attr-defined]
                windowed = max(first_windowed, low)
                windows = (windowed + at, high + at) if windowed < high else (high + at, high + at)
                parts.append(Part(piece.segment.record, low + at, high + at, windows))  # type: ignore[attr-defined]
        state = None if match.state is None else match.state.record  # type: ignore[attr-defined]
        return _Reading(
            seq_id=seq_id,
            key=key,
            space=space,
            match=match,
            start=start,
            parts=tuple(parts),
            state=state,
            loads=tuple(_loads(parts, state)),
            num_gained=num_gained,
        )

    def _read(self, reading: _Reading) -> None:
        """Read the files. Runs on a reader's thread; the engine thread has made the arrays."""
        for record, index in reading.loads:
            empty = reading.empty.get()
            if empty is None or reading.is_cancelled or self._is_closed:
                return
            reading.current = record
            array, data = empty
            self._folder.read_into(record, index, data)
            self._owner.post(partial(self._arrived, reading, record, index, array))
        self._owner.post(partial(self._read_done, reading))

    def _make_arrays(self, reading: _Reading) -> None:
        """Make the arrays that are filled next."""
        while reading.ahead_bytes <= _AHEAD_BYTES - _MADE_BYTES and reading.num_made < len(reading.loads):
            tensors: list[Tensor] = []
            for record, index in reading.loads[reading.num_made :]:
                tensors.append(record.tensors[index])
                if sum(tensor.nbytes for tensor in tensors) >= _MADE_BYTES:
                    break
            try:
                made = empty_arrays(tensors)
            except _MALFORMED as error:
                reading.current = record
                self._read_failed(reading, error)
                return
            for array in made:
                reading.empty.put(array)
            reading.num_made += len(tensors)
            reading.ahead_bytes += sum(tensor.nbytes for tensor in tensors)

    def _arrived(self, reading: _Reading, record: Record, index: int, array: mx.array) -> None:
        if reading.is_cancelled:
            return
        reading.arrays[record.name, index] = array
        reading.ahead_bytes -= record.tensors[index].nbytes
        self._make_arrays(reading)

    def _read_failed(self, reading: _Reading, error: Exception) -> None:
        """The sequence computes what could not be read."""
        self._end(reading)
        if isinstance(error, (Damaged, *_MALFORMED)):
            self._owner.lose([] if reading.current is None else [reading.current])
        else:
            self._owner.fail(error)

    def _drop(self, match: Match, error: Exception) -> None:
        """Remove records that are intact, and not what their headers say."""
        logger.warning("Records of the cache on disk cannot be used: %s", error)
        self._owner.lose(_records(match))

    def _read_done(self, reading: _Reading) -> None:
        """Insert what was read into the tree in memory."""
        if reading.is_cancelled:
            return
        arrays = dict(reading.arrays)
        self._end(reading)
        try:
            segment = segment_of(reading.parts, arrays)
            state = None if reading.state is None else state_of(reading.state, arrays)
        except _MALFORMED as error:
            self._drop(reading.match, error)
            return
        self._insert(reading, segment, state)

    def _insert(self, reading: _Reading, segment: KVSegment, state: RecurrentState | None) -> None:
        end = num_tokens(reading.key)
        window_start = reading.start + segment.window_offset
        is_stored = self._memory.insert(
            reading.space,
            reading.key,
            start=reading.start,
            segment=segment,
            window_start=window_start if window_start < end else reading.start,
            state=state,
            now=time.monotonic(),
        )
        if not is_stored:
            return
        self._memory.mark_copied(reading.space, reading.key)
        self.num_hits += 1
        self.num_tokens += reading.num_gained
        self.num_bytes += reading.num_bytes
        self._read_tokens[reading.seq_id] = reading.num_gained


def _loads(parts: Iterable[Part], state: Record | None) -> Iterator[tuple[Record, int]]:
    seen: set[Key] = set()
    for part in parts:
        for key in part.tensors():
            if key not in seen:
                seen.add(key)
                yield part.record, key[1]
    if state is not None:
        yield from ((state, index) for index in range(len(state.tensors)))


def _records(match: Match) -> list[Record]:
    records = {piece.segment.record.name: piece.segment.record for piece in match.pieces}  # type: ignore[attr-defined]
    state = [] if match.state is None else [match.state.record]  # type: ignore[attr-defined]
    return [*records.values(), *state]
