"""Threads that do what they are given, in its order. They are daemons: a disk that hangs keeps no process alive."""

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread


class Workers:
    def __init__(self, num_threads: int, name: str):
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [Thread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """`work` may raise nothing. After the end, it is dropped."""
        if not self._is_closed:
            self._queue.put(work)

    def close(self, timeout_s: float) -> None:
        """Do what was given, then end. Wait for that, but for no longer than `timeout_s`."""
        self._is_closed = True
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # what it refers to is not kept until the next one comes
