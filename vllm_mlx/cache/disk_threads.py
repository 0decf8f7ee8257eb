"""Threads that do the work they are given, in order, and the part of the tier that its reader and writer use.

The threads are daemons: a disk that hangs keeps no process alive.
"""

import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from ..disk.record import Record


class Owner(Protocol):
    """The tier, as its reader and its writer use it."""

    @property
    def is_on(self) -> bool:
        """Whether anything may be read or written."""
        ...

    def attempt(self, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Run work of another thread. `failed` is called on the engine thread if it raises an error."""
        ...

    def post(self, act: Callable[[], None]) -> None:
        """Have `act` called on the engine thread. May be called on any thread."""
        ...

    def make_room(self, num_bytes: int, then: Callable[[bool], None]) -> None:
        """Remove the files of least worth. `then` gets whether any was removed."""
        ...

    def sweep(self) -> None:
        """Remove the files that no longer contain anything in use."""
        ...

    def lose(self, records: Iterable[Record]) -> None:
        """Remove records that cannot be used."""
        ...

    def lost(self, names: Iterable[str]) -> None:
        """Forget records whose files are gone."""
        ...

    def fail(self, error: Exception) -> None:
        """Note an error of the folder."""
        ...

    def turn_off(self, reason: str) -> None: ...


class Workers:
    def __init__(self, num_threads: int, name: str):
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [Thread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, after the work before it. Once the threads are closed, it is dropped."""
        if not self._is_closed:
            self._queue.put(work)

    def close(self, timeout_s: float) -> None:
        """Let the threads end after the work that they were given, and wait for that, at most `timeout_s`."""
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
