"""The one place that catches every error: a fence keeps a failure away from the work around it."""

import logging
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)


class Fence:
    """A `with` block whose errors do not leave it. After the block, `error` is the error that ended it, if any.

    Only subclasses of Exception are kept inside: cancellation, interrupts and exits pass.
    """

    def __init__(self, protects: str, *, is_logged: bool = True):
        """`protects` names, for the log and the reader, what goes on unharmed if the block fails."""
        self._protects = protects
        self._is_logged = is_logged
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        if self._is_logged:
            logger.error("An error was contained. Unharmed: %s", self._protects, exc_info=error)
        return True
