"""Threads for work that recurses deeply and cannot be stopped: their stack is large, and nobody waits for ever."""

import threading
from collections.abc import Callable
from typing import TypeVar

STACK_BYTES = (
    512 << 20
)  # of address space; the work takes up what it uses. 35,000 rules that refer to each other: 140 MB
T = TypeVar("T")


class CompileThreads:
    """At most `num_threads` at work. One that is waited for no longer works on to its end, and counts until then."""

    def __init__(self, *, num_threads: int, limit_s: float):
        self._limit_s = limit_s
        self._free = threading.Semaphore(num_threads)
        self._starting = threading.Lock()

    def run(self, work: Callable[[], T]) -> T:
        """What the work returns or raises. Raises TimeoutError after the limit: for a free thread, and for the work."""
        if not self._free.acquire(timeout=self._limit_s):
            raise TimeoutError
        results: list[T] = []
        errors: list[BaseException] = []

        def do() -> None:
            try:
                results.append(work())
            except BaseException as error:  # it is raised where the result is waited for
                errors.append(error)
            finally:
                self._free.release()

        thread = self._start(do)
        thread.join(self._limit_s)
        if errors:
            raise errors[0]
        if not results:
            raise TimeoutError
        return results[0]

    def _start(self, do: Callable[[], None]) -> threading.Thread:
        """The size of a stack is that of all threads which start meanwhile: only address space is lost by it."""
        with self._starting:
            usual = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=do, name="grammar", daemon=True)
                thread.start()
            finally:
                threading.stack_size(usual)
        return thread
