"""Reads state from disk for sequences that wait, and inserts it into the tree in memory.

A read is made if the disk holds a deeper resume point than memory does, and reading is faster than computing. The
sequence waits for it in the queue, while other rows continue. Then it resumes from memory like any other.

Separate threads read the files directly into arrays that the engine thread has made between two steps.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import mlx.core as mx

from ..cache.index import WORD_BYTES, common_tokens, num_tokens
from ..cache.node import Match, Space
from ..cache.stats import DiskReport
from .arrays import Key, Part, empty_arrays, segment_of, state_of
from .faults import Damaged
from .record import Record
from .store import DiskStore

_READ_S = 0.005  # added to the time of the bytes: a read is queued, and the sequence waits for a step to end
CHUNK_BYTES = 32 << 20  # arrays that are made and read at a time
_NUM_AHEAD = 8  # chunks that are made before they are read: a disk reads less during a step of other rows
_LARGE_BYTES = 16 << 20  # the speed of smaller reads says little about the disk
_NUM_SPEEDS = 5  # the median of the last speeds counts
_FIRST_BYTES_PER_S = 1e9  # the assumed speed of a disk before a read was measured
_NOTE_S = 60.0  # the last use of a record is noted at most this often

Load = tuple[Record, int]  # a tensor to read: its record, and its index there
Array = tuple[mx.array, memoryview]  # an array and its own bytes, which are filled


@dataclass(eq=False, slots=True, kw_only=True)
class _Reading:
    """A read that one sequence waits for. The fields after `key` are known once it is planned."""

    seq_id: int
    space: Space
    key: bytes  # it ends at the resume point once the read is planned
    match: Match | None = None  # pinned in the index, once the read is planned
    start: int = 0  # position of the first token that is read
    parts: tuple[Part, ...] = ()
    state: Record | None = None
    loads: deque[Load] = field(default_factory=deque)  # tensors that are not begun, in the order of the files
    num_bytes: int = 0
    num_gained: int = 0  # tokens beyond those in memory
    reserved_bytes: int = 0  # taken from the limit of the memory while it runs
    num_ahead: int = 0  # chunks that were begun and have not arrived
    arrays: dict[Key, mx.array] = field(default_factory=dict)
    is_cancelled: bool = False


class Reader:
    """Belongs to the engine thread. Only `_read` runs on another one."""

    def __init__(self, store: DiskStore, report: DiskReport):
        """`report` gets the counts of reads."""
        self._store, self._memory, self._tree = store, store.memory, store.index.tree
        self._memory.read_bytes_per_s = _FIRST_BYTES_PER_S
        self._speeds = deque([_FIRST_BYTES_PER_S] * _NUM_SPEEDS, maxlen=_NUM_SPEEDS)
        self._readings: dict[int, _Reading] = {}  # by seq_id
        self._found: dict[int, tuple[int, int]] = {}  # by seq_id: tokens that were read, and memory's resume point then
        self._counts = report

    def cancel(self, salts: str = "") -> None:
        """Drop running reads of salts that begin with `salts`. Their sequences compute the state instead."""
        for reading in list(self._readings.values()):
            if reading.space[1].startswith(salts):
                self._end(reading)

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of memory that running reads will take."""
        return sum(reading.reserved_bytes for reading in self._readings.values())

    @property
    def reading(self) -> frozenset[int]:
        """Return the seq_ids of sequences whose state is being read."""
        return frozenset(self._readings)

    def awaits(self, seq_id: int, space: Space, key: bytes) -> bool:
        """Return whether a sequence should wait, because its prefix is being read.

        The first call asks for the read, and so does a later one if memory has evicted tokens since.
        """
        if seq_id in self._readings:
            return True
        num_read, point = self._found.get(seq_id, (0, 1 << 62))
        held = self._memory.resume_length(space, key)
        if held >= point or self._store.off_reason is not None:
            return False
        same = [reading.key for reading in self._readings.values() if reading.space == space]
        if any(common_tokens(other, key) > self._memory.common_length(space, key) for other in same):
            return True  # a running read brings more of this key than memory holds
        self._found[seq_id] = num_read, held
        if self._tree.resume_length(space, key) <= held:
            return False
        self._readings[seq_id] = _Reading(seq_id=seq_id, space=space, key=key)
        self._store.threads.wake()
        return True

    def resumed(self, seq_id: int, space: Space, key: bytes) -> int:
        """Note that a sequence resumes at the key's end in memory: its files should outlive it there.

        Returns how many tokens were read for it.
        """
        if key:
            self._note_use(space, key)
        num_read, point = self._found.get(seq_id, (0, 0))
        self._counts.reads_not_used += num_read > 0 and num_tokens(key) < point
        self.forget(seq_id)  # so that it may read again if it is preempted
        return num_read

    def _note_use(self, space: Space, key: bytes) -> None:
        now = time.time()
        self._tree.touch(space, key, now=now)
        due = [stored for stored in self._store.index.stored_on(space, key) if now - stored.noted_s > _NOTE_S]
        for stored in due:
            stored.noted_s = now
        if due:
            records = [stored.record for stored in due]
            self._store.threads.write(partial(self._store.folder.note_use, records, now), self._store.fail)

    def forget(self, seq_id: int) -> None:
        """Note that the sequence has ended or resumed. A running read for it is dropped."""
        self._found.pop(seq_id, None)
        if seq_id in self._readings:
            self._end(self._readings[seq_id])

    def _end(self, reading: _Reading) -> None:
        """Drop the chunks that have arrived, and free the room reserved for the read."""
        self._readings.pop(reading.seq_id, None)
        reserved_bytes, reading.reserved_bytes = reading.reserved_bytes, 0
        reading.is_cancelled = True
        reading.arrays.clear()
        if reading.match is not None:
            self._tree.release(reading.match)
        if reserved_bytes:
            self._memory.set_limit(self._memory.max_bytes + reserved_bytes)

    # -- a read begins

    def begin(self) -> None:
        """Begin the reads that sequences have asked for."""
        for reading in [reading for reading in self._readings.values() if reading.match is None]:
            if self._plan(reading):
                self._advance(reading)
            else:
                self._end(reading)

    def _plan(self, reading: _Reading) -> bool:
        """Plan a read. Returns False if memory holds as much, computing is faster, or memory has no room."""
        space, key = reading.space, reading.key
        while True:
            held = self._memory.resume_length(space, key)
            if self._tree.resume_length(space, key) <= held:
                return False
            reading.match = match = self._tree.match(space, key, now=time.time())
            reading.num_gained = match.length - held
            self._place(reading, match)
            if not self._is_faster(reading) or not self._memory.make_room(reading.num_bytes):
                return False
            if self._memory.common_length(space, key) >= reading.start:
                break
            self._tree.release(match)  # the room was made where the read begins
        reading.key = key[: match.length * WORD_BYTES]
        reading.reserved_bytes = reading.num_bytes
        self._memory.set_limit(self._memory.max_bytes - reading.num_bytes)
        return True

    def _is_faster(self, reading: _Reading) -> bool:
        seconds = _READ_S + reading.num_bytes / median(self._speeds)
        is_slower = seconds >= reading.num_gained * self._memory.s_per_token(reading.space[0])
        if is_slower:
            self._counts.reads_not_made += 1
            self._note_speed(_FIRST_BYTES_PER_S)  # so that a disk that was slow for a while is tried again
        return not is_slower

    def _note_speed(self, bytes_per_s: float) -> None:
        self._speeds.append(bytes_per_s)
        self._memory.read_bytes_per_s = median(self._speeds)

    def _place(self, reading: _Reading, match: Match) -> None:
        """Read the KV, and the windows at the resume point, that memory lacks."""
        end, window = match.length, self._memory.rule(match.space[0]).window
        first_windowed = end if window is None else max(0, end - window)
        start = min(self._memory.common_length(match.space, reading.key), end - 1, first_windowed)
        parts = []
        for piece in match.pieces:
            low, high = max(piece.start, start), piece.start + piece.take
            if low < high:
                run = piece.segment
                at = run.first - piece.start
                windows = (min(max(first_windowed, low), high) + at, high + at)
                parts.append(Part(run.stored.record, low + at, high + at, windows))
        state = None if match.state is None else match.state.stored.record  # type: ignore[attr-defined]
        reading.start, reading.parts, reading.state = start, tuple(parts), state
        reading.loads = deque(_loads(parts, state))
        reading.num_bytes = _size(reading.loads)

    def _advance(self, reading: _Reading) -> None:
        """Make the arrays that are filled next, and have them filled. Once all have arrived, insert them."""
        while reading.loads and reading.num_ahead < _NUM_AHEAD:
            chunk: list[Load] = []
            while reading.loads and _size(chunk) < CHUNK_BYTES:
                chunk.append(reading.loads.popleft())
            arrays = empty_arrays([record.tensors[index] for record, index in chunk])
            reading.num_ahead += 1
            self._store.threads.read(partial(self._read, reading, chunk, arrays), partial(self._failed, reading))
        if not reading.num_ahead:
            self._insert(reading)

    # -- and ends

    def _read(self, reading: _Reading, chunk: list[Load], arrays: list[Array]) -> None:
        """Read a chunk. Runs on a reader's thread."""
        begun_s = time.monotonic()
        for (record, index), (_, data) in zip(chunk, arrays, strict=True):
            if reading.is_cancelled:
                return
            self._store.folder.read_into(record, index, data)
        self._store.threads.post(partial(self._arrived, reading, chunk, arrays, time.monotonic() - begun_s))

    def _arrived(self, reading: _Reading, chunk: list[Load], arrays: list[Array], seconds: float) -> None:
        if reading.is_cancelled:
            return
        if (num_bytes := _size(chunk)) >= _LARGE_BYTES:
            self._note_speed(num_bytes / max(seconds, 1e-9))
        for (record, index), (array, _) in zip(chunk, arrays, strict=True):
            reading.arrays[record.name, index] = array
        reading.num_ahead -= 1
        self._advance(reading)

    def _failed(self, reading: _Reading, error: Exception) -> None:
        """End a read that failed. The sequence computes the missing state."""
        self._end(reading)
        if isinstance(error, Damaged):
            self._store.index.lose(error.name)
        else:
            self._store.fail(error)

    def _insert(self, reading: _Reading) -> None:
        """Insert the state that was read into the tree in memory."""
        segment = segment_of(reading.parts, reading.arrays)
        state = None if reading.state is None else state_of(reading.state, reading.arrays)
        self._end(reading)
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
        num_read, _ = self._found[reading.seq_id]
        point = self._memory.resume_length(reading.space, reading.key + bytes(WORD_BYTES))  # of a longer key
        self._found[reading.seq_id] = max(num_read, reading.num_gained if is_stored else 0), point
        self._counts.reads_not_used += not is_stored
        if is_stored:
            self._memory.mark_copied(reading.space, reading.key)
            self._counts.hits += 1
            self._counts.tokens_read += reading.num_gained
            self._counts.bytes_read += reading.num_bytes


def _size(loads: Iterable[Load]) -> int:
    return sum(record.tensors[index].nbytes for record, index in loads)


def _loads(parts: Iterable[Part], state: Record | None) -> Iterator[Load]:
    seen: set[Key] = set()
    for part in parts:
        for key in part.tensors():
            if key not in seen:
                seen.add(key)
                yield part.record, key[1]
    if state is not None:
        yield from ((state, index) for index in range(len(state.tensors)))
