"""Decides when Python collects cyclic garbage. Knows nothing of requests.

A full collection visits every object while all threads wait. Python starts one when the number of objects grows, which
is exactly while a long request body is decoded: its objects are visited again and again, and none is garbage.
Therefore full collections run in quiet moments, when few objects are alive.
"""

import gc
import sys
import time
from collections.abc import Callable

DUE = 10  # collections of the middle generation after which Python would start a full one
MAX_OBJECTS = 500_000  # objects created since loading; a full collection of so many takes tens of milliseconds
MAX_WAIT_S = 60.0  # the longest wait for a quiet moment
_NEVER = 1 << 30


def freeze_garbage_collector() -> None:
    """Exclude all objects that exist now from later garbage collections."""
    gc.collect()
    gc.freeze()


class GarbageCollector:
    """Owns the settings of Python's collector from `begin` to `end`."""

    def __init__(
        self,
        *,
        num_objects: Callable[[], int] = sys.getallocatedblocks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_objects = num_objects
        self._clock = clock
        self._thresholds = gc.get_threshold()
        self._num_loaded = 0
        self._collected_s = 0.0

    def begin(self) -> None:
        freeze_garbage_collector()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._num_loaded, self._collected_s = self._num_objects(), self._clock()

    def end(self) -> None:
        gc.set_threshold(*self._thresholds)

    def tick(self) -> None:
        """Run a full collection if one is due and the moment is quiet, or if no moment was quiet for MAX_WAIT_S."""
        if gc.get_count()[2] < DUE:
            return
        is_quiet = self._num_objects() - self._num_loaded <= MAX_OBJECTS
        if is_quiet or self._clock() - self._collected_s >= MAX_WAIT_S:
            gc.collect()
            self._collected_s = self._clock()
