"""The time limit of one piece of work, shared by the thread that works and the event loop that waits for it."""

import time
from collections.abc import Callable

from .errors import Cancelled, TimeLimit


class Deadline:
    """The worker calls `check` between its steps. Any thread may call any method."""

    def __init__(self, limit_s: float, message: str, *, clock: Callable[[], float] = time.monotonic):
        """`message` is the error text that the client reads when the time is over: it names the limit and its flag."""
        self._clock = clock
        self._end_s = clock() + limit_s
        self._message = message
        self._is_cancelled = False

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed or the work was cancelled."""
        return 0.0 if self._is_cancelled else max(0.0, self._end_s - self._clock())

    def cancel(self) -> None:
        """End the work at its next check, because nobody waits for its result any more."""
        self._is_cancelled = True

    def check(self) -> None:
        """Raises TimeLimit when the time is over, also if the work was cancelled; else Cancelled after `cancel`."""
        if self._clock() >= self._end_s:
            raise TimeLimit(self._message)
        if self._is_cancelled:
            raise Cancelled()
