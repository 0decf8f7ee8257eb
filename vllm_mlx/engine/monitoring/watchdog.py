"""Notices a step that does not end, and says where it hangs. It knows no request."""

import logging
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_PACKAGE = str(Path(__file__).parents[2])


class Watchdog:
    """`step_started_s` returns the start of the running step, or None. `thread_id` returns the thread to inspect."""

    def __init__(
        self, *, limit_s: float, step_started_s: Callable[[], float | None], thread_id: Callable[[], int | None]
    ):
        self._limit_s = limit_s
        self._step_started_s = step_started_s
        self._thread_id = thread_id
        self._logged_s: float | None = None  # start of the step that was logged

    def error(self) -> str | None:
        """Why the engine hangs, or None. The first call during a hanging step logs the stack."""
        started_s = self._step_started_s()
        if started_s is None or time.monotonic() - started_s < self._limit_s:
            return None
        stack = stack_of(self._thread_id())
        if self._logged_s != started_s:
            self._logged_s = started_s
            logger.error("The engine hangs in a step:\n%s", "".join(stack.format()))
        return f"The engine has been in one step for {time.monotonic() - started_s:.0f} s{place_in(stack)}."


def stack_of(thread_id: int | None) -> traceback.StackSummary:
    """The stack of a thread; empty if there is no such thread."""
    frame = sys._current_frames().get(thread_id or 0)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)


def place_in(stack: traceback.StackSummary) -> str:
    """The innermost frame of our own code, as the end of a sentence; empty for an empty stack."""
    own = [frame for frame in stack if frame.filename.startswith(_PACKAGE)] or list(stack)
    return f", in {own[-1].name} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
