"""The bytes that rows and cached state may use. They are planned at load, and lowered after a step above the limit."""

import logging
import math
from dataclasses import dataclass

from ..core.memory import NO_OVERRUN, MemoryBudget, Pressure, RowFootprint, readable
from ..core.sequence import Sequence
from ..core.step import StepOutput
from ..util.faults import Fault
from .decode_groups import DecodeGroups
from .image_planner import MLLMScheduler
from .prefill_pacer import PrefillPacer
from .prefix_planner import PrefixPlanner
from .running_set import RunningSet

logger = logging.getLogger(__name__)

_GROWTH_STEPS = 1024  # steps within the limit after which the complete pool is used again
RESERVED_OUTPUT = 2048  # tokens of a reply for which admission reserves memory
_LEVELS = list(Pressure)  # in rising order
_REFUSED_SHARE = 4  # the pool shrinks by a quarter of the used bytes when the device has no memory
_MARGIN = 16  # a pool that has grown by 1/16 has room again
_KEPT_UNDER_PRESSURE = {Pressure.WARNING: 0.75, Pressure.CRITICAL: 0.5}  # share of the used bytes
_GROWN_UNDER_PRESSURE = {Pressure.WARNING: 0.25, Pressure.CRITICAL: 0.125}  # share of the planned bytes


class MemoryPool:
    """Owns the size of the pool, and asks the pacer for shorter chunks before it shrinks the pool."""

    def __init__(self, memory: MemoryBudget, pacer: PrefillPacer):
        self.num_bytes = memory.rows_bytes
        self.num_shortened = 0  # times that chunks were made shorter
        self.planned_bytes = memory.rows_bytes  # its size while the device has all the memory that was planned
        self._pacer = pacer
        self._used_bytes = 0
        self._rows_bytes = 0
        self._pressure = Pressure.NORMAL
        self._crowded_bytes: int | None = None  # its size when a row was preempted; None once a row has ended

    @property
    def is_crowded(self) -> bool:
        """Return whether a row that is admitted now would soon be preempted."""
        margin = self.planned_bytes // _MARGIN
        return self._crowded_bytes is not None and self.num_bytes < self._crowded_bytes + margin

    def plan(self, num_bytes: int) -> None:
        """Set its size while the device has all the memory that was planned. What the device lacks stays lacking."""
        self.num_bytes = max(0, min(self.num_bytes + num_bytes - self.planned_bytes, num_bytes))
        self.planned_bytes = num_bytes

    def crowd(self) -> None:
        """Note that a row was preempted."""
        self._crowded_bytes = self.num_bytes

    def relieve(self) -> None:
        """Note that a row has ended, or left for another reason than memory pressure."""
        self._crowded_bytes = None

    def use(self, *, rows_bytes: int, kept_bytes: int) -> None:
        """Note the computed size of rows and of cached state at the start of a step."""
        self._rows_bytes, self._used_bytes = rows_bytes, rows_bytes + kept_bytes

    def observe(self, output: StepOutput) -> bool:
        """Shorten prefill chunks first after an overrun; shrink the pool only if that is not enough.

        If other programs put the machine under memory pressure, do both, once each time the pressure rises.
        Returns whether the pool has shrunk.
        """
        before = self.num_bytes
        self._adapt(output)
        return self.num_bytes < before

    def _adapt(self, output: StepOutput) -> None:
        overrun, chunks = output.overrun, output.chunk_timings
        is_rising = self._yield_to_system(overrun.pressure)
        if overrun == NO_OVERRUN:
            self._grow(self.planned_bytes)
            for chunk in chunks:
                self._pacer.lengthen(chunk.num_tokens)
            return
        if not overrun.peak_bytes:
            if not is_rising:
                self._grow(int(self.planned_bytes * _GROWN_UNDER_PRESSURE[overrun.pressure]))
            return
        is_shorter = bool(chunks) and self._pacer.shorten(max(chunk.num_tokens for chunk in chunks))
        self.num_shortened += is_shorter
        if lacking := overrun.kept_bytes if is_shorter else overrun.peak_bytes:
            self._shrink_to(max(0, self._used_bytes - lacking))

    def _grow(self, limit: int) -> None:
        """Grow by one step, to at most `limit` bytes."""
        grown = self.num_bytes + max(1, self.planned_bytes // _GROWTH_STEPS)
        self.num_bytes = max(self.num_bytes, min(limit, grown))

    def _yield_to_system(self, pressure: Pressure) -> bool:
        """Give a part of the memory back at a warning, but preempt no row for it. Give half back at a critical level.

        Returns whether the pressure has risen. A pool that was hardly used grows again while the pressure lasts.
        """
        is_rising = _LEVELS.index(pressure) > _LEVELS.index(self._pressure)
        self._pressure = pressure
        if not is_rising:
            return False
        self.num_shortened += self._pacer.shorten(self._pacer.longest_chunk)
        kept = int(self._used_bytes * _KEPT_UNDER_PRESSURE[pressure])
        self._shrink_to(kept if pressure is Pressure.CRITICAL else max(self._rows_bytes, kept))
        return True

    def heed(self, fault: Fault, num_tokens: int = 0) -> bool:
        """Ask less of a device that failed: shorter chunks if a chunk of `num_tokens` ran, less memory if it had none.

        Returns whether chunks have become shorter.
        """
        is_shorter = num_tokens > 0 and self._pacer.shorten(num_tokens)
        self.num_shortened += is_shorter
        if fault is Fault.OUT_OF_MEMORY:
            self._shrink_to(self._used_bytes - self._used_bytes // _REFUSED_SHARE)
        return is_shorter

    def _shrink_to(self, num_bytes: int) -> None:
        if num_bytes >= self.num_bytes:
            return
        if self.num_bytes == self.planned_bytes:
            logger.warning(
                "The device has less memory than planned: running requests and the prefix cache now share "
                "%s instead of %s",
                readable(num_bytes),
                readable(self.planned_bytes),
            )
        self.num_bytes = num_bytes


@dataclass(eq=False, slots=True)
class Room:
    """Measures the rows, and keeps cached state within the memory that they leave of the pool."""

    max_num_seqs: int
    pool: MemoryPool
    footprint: RowFootprint
    seqs: RunningSet
    groups: DecodeGroups
    prefix_cache: PrefixPlanner | None
    images: MLLMScheduler | None
    is_shared: bool = False  # whether other models may give memory back
    first_beside: float = math.inf  # the id of the row of another model that came first; infinite without any

    @property
    def kept_bytes(self) -> int:
        """Return bytes of the pool that cached state and features of images take."""
        return self.image_bytes + (0 if self.prefix_cache is None else self.prefix_cache.held_bytes)

    @property
    def image_bytes(self) -> int:
        """Return bytes of image features that are kept."""
        return 0 if self.images is None else self.images.used_bytes

    def bytes_of(self, row: Sequence, extra: int = 0) -> int:
        """Return bytes of one row with its complete prompt, without padding, once it has grown by `extra` tokens."""
        return self.footprint.bytes_at(max(row.num_tokens, row.num_computed_tokens) + extra)

    @property
    def first_id(self) -> float:
        """Return the id of the row that came first; infinite if there is none."""
        return min(self.seqs.by_id, default=math.inf)

    def coming_bytes(self, seq: Sequence) -> int:
        """Return bytes of a sequence that is admitted, with a part of its reply: longer replies may be preempted."""
        reserved = min(RESERVED_OUTPUT, seq.max_tokens - seq.num_output_tokens)
        return self.footprint.bytes_at(seq.num_tokens + reserved)

    @property
    def growth_bytes(self) -> int:
        """Return bytes for which the rows were admitted, and which they do not take yet."""
        return sum(self.coming_bytes(row) - self.bytes_of(row) for row in self.seqs.rows())

    def has_room_beside(self, coming_bytes: int) -> bool:
        """Return whether a row may be its model's first: it waits only for memory that other models may give back."""
        is_free = len(self.seqs) > 0 or not self.is_shared
        return is_free or coming_bytes <= self.pool.planned_bytes

    def share(self, num_bytes: int) -> float:
        """Return the share that a row of so many bytes has of all places, or of the memory if that is larger."""
        return max(1 / self.max_num_seqs, num_bytes / max(1, self.pool.num_bytes))

    def rows_bytes(self, *, extra: int = 0) -> int:
        """Return bytes of all rows, padded and with complete prompts, once each has grown by `extra` tokens."""
        num_bytes, lengths = 0, {seq.seq_id: seq.num_computed_tokens for seq in self.seqs.rows()}
        for group in self.groups.shared:
            if padded := [lengths.pop(row) for row in group if row in lengths]:
                num_bytes += len(padded) * self.footprint.bytes_at(max(padded) + extra)
        alone = (self.seqs.by_id[row] for row in lengths)
        return num_bytes + sum(self.bytes_of(row, extra) for row in alone)

    def shrink_cache(self, rows_bytes: int | None = None) -> None:
        """Keep features of images, and then cached state, within the memory that rows leave of the pool.

        Without `rows_bytes`, these are the rows of the next step.
        """
        room = max(0, self.pool.num_bytes - (self.rows_bytes(extra=1) if rows_bytes is None else rows_bytes))
        if self.images is not None:
            room = max(0, room - self.images.shrink_to(room))
        if self.prefix_cache is not None:
            self.prefix_cache.shrink_to(room)
