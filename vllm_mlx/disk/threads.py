"""Threads that work in order, and queue their reports for the engine thread.

The threads are daemons: a disk that hangs keeps no process alive.
"""

from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

from ..util.fence import Fence
from ..util.tasks import do_nothing

_NUM_READERS = 2

Act = Callable[[], object]
Failed = Callable[[Exception], object]
_Queue = SimpleQueue[tuple[Act, Failed] | None]


class Threads:
    """Two threads read, and one writes. All methods may be called on any thread."""

    def __init__(self) -> None:
        self.wake: Act = do_nothing  # called on any thread when something was posted
        self.is_closed = False
        self._news: SimpleQueue[Act] = SimpleQueue()
        self._reads: _Queue = SimpleQueue()
        self._writes: _Queue = SimpleQueue()
        for _ in range(_NUM_READERS):
            self._started("disk-read", self._reads)
        self._writer = self._started("disk-write", self._writes)

    def _started(self, name: str, queue: _Queue) -> Thread:
        thread = Thread(target=self._run, args=(queue,), name=name, daemon=True)
        thread.start()
        return thread

    def read(self, work: Act, failed: Failed) -> None:
        """Run work on a thread that reads. `failed` is called on the engine thread if it raises an error."""
        self._reads.put((work, failed))

    def write(self, work: Act, failed: Failed) -> None:
        """Run work on the thread that writes, after the work before it. Once the threads are closed, it is dropped."""
        if not self.is_closed:
            self._writes.put((work, failed))

    def post(self, act: Act) -> None:
        """Queue a call of `act` on the engine thread."""
        self._news.put(act)
        self.wake()

    @property
    def has_news(self) -> bool:
        return not self._news.empty()

    def take_news(self, timeout_s: float) -> None:
        """Run the posted calls. Called on the engine thread, which waits for them at most `timeout_s`."""
        while True:
            try:
                act = self._news.get(timeout_s > 0, timeout_s)
            except Empty:
                return
            act()
            del act  # so that it keeps nothing alive until the next act comes
            timeout_s = 0.0

    def close(self, timeout_s: float) -> None:
        """Let the threads end after their queued work, and wait at most `timeout_s` for writes."""
        self.is_closed = True
        for queue in (self._writes, *[self._reads] * _NUM_READERS):
            queue.put(None)
        self._writer.join(timeout_s)

    def _run(self, queue: _Queue) -> None:
        while (item := queue.get()) is not None:
            work, failed = item
            if (error := contained(work)) is not None:
                self.post(partial(failed, error))
            del item, work, failed, error  # so that they keep nothing alive until the next work comes


def contained(work: Act) -> Exception | None:
    """Do the work, and return the error that ended it, if any did."""
    with Fence("the server, which goes on without what is on disk", is_logged=False) as fence:
        work()
    return fence.error
