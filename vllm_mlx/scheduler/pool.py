"""What live rows and cached state may take together: as reckoned at load, less where a step took more than there is."""

import logging

from ..core.memory import NO_OVERRUN, MemoryBudget
from ..core.step import StepOutput
from .pacing import PrefillPacer

logger = logging.getLogger(__name__)

_GROWTH_STEPS = 1024  # that end within the limit, until all of the pool is used again
_MARGIN = 16  # a pool that has grown by one part in so many has room again


class Pool:
    def __init__(self, memory: MemoryBudget, pacer: PrefillPacer):
        self.num_bytes = memory.rows_bytes
        self.num_shortened = 0  # times that chunks became shorter
        self._reckoned_bytes = memory.rows_bytes
        self._pacer = pacer
        self._used_bytes = 0
        self._crowded_bytes: int | None = None  # its size when a row was preempted, until one has ended

    @property
    def is_crowded(self) -> bool:
        """A row that is admitted would soon be preempted."""
        margin = self._reckoned_bytes // _MARGIN
        return self._crowded_bytes is not None and self.num_bytes < self._crowded_bytes + margin

    def crowd(self) -> None:
        """A row was preempted."""
        self._crowded_bytes = self.num_bytes

    def relieve(self) -> None:
        """A row has ended, or given up its place without being pressed."""
        self._crowded_bytes = None

    def use(self, num_bytes: int) -> None:
        """What rows and cached state take at the start of a step, as reckoned."""
        self._used_bytes = num_bytes

    def observe(self, output: StepOutput) -> None:
        """Shorter chunks come first; what they do not mend leaves the pool."""
        overrun, chunks = output.overrun, output.chunk_timings
        if overrun == NO_OVERRUN:
            self.num_bytes = min(self._reckoned_bytes, self.num_bytes + max(1, self._reckoned_bytes // _GROWTH_STEPS))
            for chunk in chunks:
                self._pacer.lengthen(chunk.num_tokens)
            return
        is_shorter = bool(chunks) and self._pacer.shorten(max(each.num_tokens for each in chunks))
        self.num_shortened += is_shorter
        if lacking := overrun.kept_bytes if is_shorter else overrun.peak_bytes:
            self._shrink_to(max(0, self._used_bytes - lacking))

    def _shrink_to(self, num_bytes: int) -> None:
        if num_bytes >= self.num_bytes:
            return
        if self.num_bytes == self._reckoned_bytes:
            logger.warning(
                "The device has less memory than was reckoned: conversations are kept, and run side by side, in "
                "%.2f GB for now instead of %.2f GB",
                num_bytes / 1e9,
                self._reckoned_bytes / 1e9,
            )
        self.num_bytes = num_bytes
