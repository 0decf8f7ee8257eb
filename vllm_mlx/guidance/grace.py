"""The extra time that slow grammars of one tenant may take, over all of its replies. It knows no reply."""

import time
from collections.abc import Callable

GRACE_S = 1.0  # seconds for all replies of one tenant together, beyond the allowances of replies
REFILL = 0.02  # share of the passing time by which a tenant's grace is refilled


class Grace:
    """Spent on the engine thread; other threads may read `wait_s`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._left_s = GRACE_S
        self._seen_s = clock()

    def spend(self, seconds: float) -> bool:
        """Take time from the grace. False once it is used up; it is refilled as time passes."""
        self._left_s, self._seen_s = self._now_left_s() - seconds, self._clock()
        return self._left_s >= 0

    @property
    def wait_s(self) -> float:
        """The time until what was taken beyond the grace has come back. 0: nothing was."""
        return max(0.0, -self._now_left_s() / REFILL)

    def _now_left_s(self) -> float:
        return min(GRACE_S, self._left_s + REFILL * (self._clock() - self._seen_s))
