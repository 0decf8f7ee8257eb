"""How long the decoding of one video may take, within the time of its whole request."""

import time

from ...core.deadline import Deadline
from ...core.errors import InvalidImage


class DecodeClock:
    """Runs from now on. The decoder calls `check` between frames."""

    def __init__(self, limit_s: float, deadline: Deadline):
        """`deadline`: of all preparation of the request."""
        self._limit_s = limit_s
        self._end_s = time.monotonic() + limit_s
        self._deadline = deadline

    def check(self) -> None:
        """Raises InvalidImage once the video took too long, and what the deadline raises."""
        self._deadline.check()
        if time.monotonic() > self._end_s:
            raise InvalidImage(
                f"it takes longer than {self._limit_s:g} seconds to decode (--max-decode-s). Send a shorter one, or a "
                "smaller one."
            )
