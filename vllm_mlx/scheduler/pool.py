"""What live rows and cached state may take together: as reckoned at load, less where a step took more than there is."""

from collections.abc import Callable

from ..core.memory import NO_OVERRUN, MemoryBudget
from ..core.step import StepOutput
from .pacing import PrefillPacer

_GROWTH_STEPS = 1024  # that end within the limit, until all of the pool is used again


class Pool:
    def __init__(self, memory: MemoryBudget, pacer: PrefillPacer):
        self.num_bytes = memory.rows_bytes
        self.num_shortened = 0  # times that chunks became shorter
        self._reckoned_bytes = memory.rows_bytes
        self._pacer = pacer

    def observe(self, output: StepOutput, used_bytes: Callable[[], int]) -> None:
        """`used_bytes` of the pool, as reckoned. Shorter chunks come first; what they do not mend leaves the pool."""
        overrun, chunks = output.overrun, output.chunk_timings
        if overrun == NO_OVERRUN:
            self.num_bytes = min(self._reckoned_bytes, self.num_bytes + max(1, self._reckoned_bytes // _GROWTH_STEPS))
            return
        is_shorter = bool(chunks) and self._pacer.shorten(max(each.num_tokens for each in chunks))
        self.num_shortened += is_shorter
        lacking = overrun.kept_bytes if is_shorter else overrun.peak_bytes
        if lacking:
            self.num_bytes = min(self.num_bytes, max(0, used_bytes() - lacking))
