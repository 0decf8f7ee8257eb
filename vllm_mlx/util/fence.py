"""The one place that catches every error: a fence keeps a failure away from the work around it.

It also frees the objects that an error keeps alive.
"""

import logging
import traceback
from types import TracebackType
from typing import Self

from .faults import device_fault

logger = logging.getLogger(__name__)


class Fence:
    """A `with` block whose errors do not leave it. After the block, `error` is the error that ended it, if any.

    An error that was logged has no traceback any more, so that the failed work's arrays are freed immediately.
    Only subclasses of Exception are kept inside: cancellation, interrupts and exits pass.
    """

    def __init__(self, protects: str, *, is_logged: bool = True):
        """`protects` names, for the log and the reader, the work that continues unharmed if the block fails."""
        self._protects = protects
        self._is_logged = is_logged
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        if self._is_logged:
            logger.error("An error was caught. It does not affect: %s", self._protects, exc_info=error)
            clear_locals(error)
            error.with_traceback(None)  # it leads to the frame that has this fence, and so to the error again
        return True


class RowFence(Fence):
    """A fence around the work of some rows. A device fault passes it, because it leaves no row unharmed."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return device_fault(error) is None and super().__exit__(kind, error, trace)


def clear_locals(error: BaseException) -> None:
    """Free the locals of all finished frames of an exception, its causes and its group. Line numbers stay for the log.

    An exception is often part of a reference cycle (frame, future, exception) that only a full garbage collection
    frees. Until then it would keep everything that its frames refer to.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
