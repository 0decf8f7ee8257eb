"""Reads state from disk for sequences that wait, and inserts it into the tree in memory.

A read is made if the disk holds a deeper resume point than memory does, and reading is faster than computing. The
sequence waits for it in the queue, while other rows go on. Then it resumes from memory like any other.

The files are read on threads of their own, straight into arrays that the engine thread has made between two steps.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from statistics import median

import mlx.core as mx

from ..cache.index import WORD_BYTES, common_tokens, num_tokens
from ..cache.node import Match, ResumeRule, Space
from ..cache.snapshot import DamagedSnapshot, KVSegment, RecurrentState
from ..cache.tree import PrefixTree
from .arrays import Key, Part, empty_arrays, segment_of, state_of
from .faults import Damaged
from .folder import Folder
from .index import DiskIndex
from .record import Record
from .removal import Removal
from .threads import Threads

logger = logging.getLogger(__name__)

_READ_S = 0.005  # what a read takes in addition to its bytes: it is queued, and the sequence waits for a step to end
_AHEAD_BYTES = 256 << 20  # arrays that are made before they are read: a disk reads less in a step of other rows
_MADE_BYTES = 32 << 20  # arrays that are made at a time
_LARGE_BYTES = 16 << 20  # the speed of smaller reads says little of the disk
_NUM_SPEEDS = 5  # last reads whose middle speed counts
# Raised by layouts that this program did not write:
_MALFORMED = (DamagedSnapshot, LookupError, TypeError, ValueError, AttributeError)


@dataclass(eq=False, slots=True, kw_only=True)
class _Reading:
    """A read that one sequence waits for. What follows `key` is known once the read is planned."""

    seq_id: int
    space: Space
    key: bytes  # it ends at the resume point once the read is planned
    match: Match | None = None  # pinned in the index
    start: int = 0  # position of the first token that is read
    parts: tuple[Part, ...] = ()
    state: Record | None = None
    loads: tuple[tuple[Record, int], ...] = ()  # the tensors to read: a record and an index, in the order of the files
    num_gained: int = 0  # tokens beyond what memory holds
    reserved_bytes: int = 0  # taken from the limit of the memory while it runs
    current: Record | None = None  # the record that is being read
    arrays: dict[Key, mx.array] = field(default_factory=dict)
    empty: SimpleQueue[tuple[mx.array, memoryview] | None] = field(default_factory=SimpleQueue)  # arrays to fill
    num_made: int = 0  # arrays were made for the first ones of `loads`
    seconds: float = 0.0  # that the disk took
    ahead_bytes: int = 0  # arrays that were made and have not arrived yet
    is_cancelled: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(record.tensors[index].nbytes for record, index in self.loads)


class Reader:
    """Belongs to the engine thread, but for `_read`."""

    def __init__(
        self,
        threads: Threads,
        folder: Folder,
        memory: PrefixTree,
        index: DiskIndex,
        removal: Removal,
        fail: Callable[[Exception], None],
        *,
        rule: ResumeRule,
        s_per_token: float,
        read_bytes_per_s: float,
        clock: Callable[[], float],
    ):
        self._threads, self._folder, self._memory, self._index = threads, folder, memory, index
        self._removal, self._fail = removal, fail
        self._rule, self._s_per_token = rule, s_per_token
        self._assumed_bytes_per_s = memory.read_bytes_per_s = read_bytes_per_s  # until reads were measured
        self._speeds = deque([read_bytes_per_s] * _NUM_SPEEDS, maxlen=_NUM_SPEEDS)
        self._clock = clock
        self._readings: dict[int, _Reading] = {}  # by seq_id
        self._asked: list[_Reading] = []  # those of them that are not planned yet
        self._found: dict[int, tuple[int, int]] = {}  # by seq_id: tokens that were read, and the resume point behind
        self.num_hits = self.num_tokens = self.num_bytes = self.num_not_made = self.num_short = 0

    def cancel(self, salts: str = "") -> None:
        """Drop what is being read of salts that begin with `salts`. The sequences compute it."""
        for reading in list(self._readings.values()):
            if reading.space[1].startswith(salts):
                self._end(reading)

    @property
    def reserved_bytes(self) -> int:
        """Memory that running reads will take."""
        return sum(reading.reserved_bytes for reading in self._readings.values())

    @property
    def reading(self) -> frozenset[int]:
        """The seq_ids of sequences whose state is being read."""
        return frozenset(self._readings)

    def awaits(self, seq_id: int, space: Space, key: bytes) -> bool:
        """Whether a sequence should wait, because its prefix is being read. The first call asks for the read."""
        if seq_id in self._readings:
            return True
        if seq_id in self._found:
            return False
        if any(self._overlap(reading, space, key) for reading in self._readings.values()):
            return True
        self._found[seq_id] = 0, 0
        if self._index.tree.resume_length(space, key) <= self._memory.resume_length(space, key):
            return False
        self._readings[seq_id] = reading = _Reading(seq_id=seq_id, space=space, key=key)
        self._asked.append(reading)
        self._threads.wake()
        return True

    def _overlap(self, reading: _Reading, space: Space, key: bytes) -> bool:
        """Whether a running read brings more of this key than memory holds."""
        if reading.space != space:
            return False
        return common_tokens(reading.key, key) > self._memory.common_length(space, key)

    def resumed(self, seq_id: int, length: int) -> int:
        """Returns how many tokens were read for this sequence, which now resumes from so many in memory."""
        num_read, point = self._found.get(seq_id, (0, 0))
        self.num_short += length < point
        self.forget(seq_id)  # so that it may read again if it is preempted
        return num_read

    def forget(self, seq_id: int) -> None:
        """The sequence has ended, or resumed. What is being read for it is dropped."""
        self._found.pop(seq_id, None)
        if seq_id in self._readings:
            self._end(self._readings[seq_id])

    def _end(self, reading: _Reading) -> None:
        """What has arrived is dropped, and the room that it would have taken is free again."""
        self._readings.pop(reading.seq_id, None)
        reserved_bytes, reading.reserved_bytes = reading.reserved_bytes, 0
        reading.is_cancelled = True
        reading.empty.put(None)
        reading.arrays.clear()
        if reading.match is not None:
            self._index.tree.release(reading.match)
        if reserved_bytes:
            self._memory.set_limit(self._memory.max_bytes + reserved_bytes)

    # -- a read begins

    def begin(self) -> None:
        """Begin the reads that sequences have asked for."""
        while self._asked:
            reading = self._asked.pop(0)
            if not reading.is_cancelled:
                self._begin(reading)

    def _begin(self, reading: _Reading) -> None:
        if not self._plan(reading):
            self._end(reading)
            return
        self._make_arrays(reading)
        self._threads.read(partial(self._read, reading), partial(self._read_failed, reading))

    def _plan(self, reading: _Reading) -> bool:
        """Find out what to read. False: memory holds as much, computing is faster, or memory has no room."""
        space, key = reading.space, reading.key
        while True:
            held = self._memory.resume_length(space, key)
            if self._index.tree.resume_length(space, key) <= held:
                return False
            match = self._index.tree.match(space, key, now=self._clock())
            try:
                self._place(reading, match, match.length - held)
            except _MALFORMED as error:
                self._drop(match, error)
                return False
            if not self._is_faster(reading) or not self._memory.make_room(reading.num_bytes):
                return False
            if self._memory.common_length(space, key) >= reading.start:
                break
            self._index.tree.release(match)  # the room was made where the read begins
        reading.key = key[: match.length * WORD_BYTES]
        reading.reserved_bytes = reading.num_bytes
        self._memory.set_limit(self._memory.max_bytes - reading.num_bytes)
        return True

    def _is_faster(self, reading: _Reading) -> bool:
        seconds = _READ_S + reading.num_bytes / median(self._speeds)
        is_slower = seconds >= reading.num_gained * self._s_per_token
        if is_slower:
            self.num_not_made += 1
            self._note_speed(self._assumed_bytes_per_s)  # so that a disk that was slow for a while is tried again
        return not is_slower

    def _note_speed(self, bytes_per_s: float) -> None:
        self._speeds.append(bytes_per_s)
        self._memory.read_bytes_per_s = median(self._speeds)

    def _place(self, reading: _Reading, match: Match, num_gained: int) -> None:
        """Read what memory lacks of the KV, and of the windows at the resume point."""
        end, window = match.length, self._rule.window
        first_windowed = end if window is None else max(0, end - window)
        start = min(self._memory.common_length(match.space, reading.key), end - 1, first_windowed)
        parts = []
        for piece in match.pieces:
            low, high = max(piece.start, start), piece.start + piece.take
            if low < high:
                at = piece.segment.first - piece.start  # type: ignore[attr-defined]
                windows = (min(max(first_windowed, low), high) + at, high + at)
                parts.append(Part(piece.segment.record, low + at, high + at, windows))  # type: ignore[attr-defined]
        state = None if match.state is None else match.state.record  # type: ignore[attr-defined]
        reading.match, reading.start, reading.parts, reading.state = match, start, tuple(parts), state
        reading.loads, reading.num_gained = tuple(_loads(parts, state)), num_gained

    def _make_arrays(self, reading: _Reading) -> None:
        """Make the arrays that are filled next."""
        while reading.ahead_bytes <= _AHEAD_BYTES - _MADE_BYTES and reading.num_made < len(reading.loads):
            tensors = []
            for record, index in reading.loads[reading.num_made :]:
                tensors.append(record.tensors[index])
                if sum(tensor.nbytes for tensor in tensors) >= _MADE_BYTES:
                    break
            for array in empty_arrays(tensors):
                reading.empty.put(array)
            reading.num_made += len(tensors)
            reading.ahead_bytes += sum(tensor.nbytes for tensor in tensors)

    # -- and ends

    def _read(self, reading: _Reading) -> None:
        """Read the files. Runs on a reader's thread; the engine thread has made the arrays."""
        for record, index in reading.loads:
            empty = reading.empty.get()
            if empty is None or reading.is_cancelled:
                return
            reading.current = record
            array, data = empty
            begun_s = time.monotonic()
            self._folder.read_into(record, index, data)
            reading.seconds += time.monotonic() - begun_s
            self._threads.post(partial(self._arrived, reading, record, index, array))
        self._threads.post(partial(self._read_done, reading))

    def _arrived(self, reading: _Reading, record: Record, index: int, array: mx.array) -> None:
        if not reading.is_cancelled:
            reading.arrays[record.name, index] = array
            reading.ahead_bytes -= record.tensors[index].nbytes
            self._make_arrays(reading)

    def _read_failed(self, reading: _Reading, error: Exception) -> None:
        """The sequence computes what could not be read."""
        self._end(reading)
        if not isinstance(error, Damaged):
            self._fail(error)
        elif reading.current is not None:
            self._removal.lose(reading.current)

    def _drop(self, match: Match, error: Exception) -> None:
        """Remove records that are intact, and not what their rows say."""
        logger.warning("Records of the cache on disk cannot be used: %s", error)
        self._index.tree.release(match)
        for piece in match.pieces:
            self._removal.lose(piece.segment.record)  # type: ignore[attr-defined]
        if match.state is not None:
            self._removal.lose(match.state.record)  # type: ignore[attr-defined]

    def _read_done(self, reading: _Reading) -> None:
        """Insert what was read into the tree in memory."""
        if reading.is_cancelled:
            return
        if reading.num_bytes >= _LARGE_BYTES:
            self._note_speed(reading.num_bytes / max(reading.seconds, 1e-9))
        arrays, match = dict(reading.arrays), reading.match
        assert match is not None
        self._end(reading)
        try:
            segment = segment_of(reading.parts, arrays)
            state = None if reading.state is None else state_of(reading.state, arrays)
        except _MALFORMED as error:
            self._drop(match, error)
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
        self._found[reading.seq_id] = (reading.num_gained if is_stored else 0), end
        if is_stored:
            self._memory.mark_copied(reading.space, reading.key)
            self.num_hits += 1
            self.num_tokens += reading.num_gained
            self.num_bytes += reading.num_bytes


def _loads(parts: Iterable[Part], state: Record | None) -> Iterator[tuple[Record, int]]:
    seen: set[Key] = set()
    for part in parts:
        for key in part.tensors():
            if key not in seen:
                seen.add(key)
                yield part.record, key[1]
    if state is not None:
        yield from ((state, index) for index in range(len(state.tensors)))
