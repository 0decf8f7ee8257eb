"""Places that several keys wait for, such as threads or processes: the keys take turns. Knows no requests."""

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Entry:
    """A caller that waits for places."""

    key: Hashable
    request: Hashable
    number: int
    is_first: bool
    given: "Future[Place]" = field(default_factory=Future)


_Line = OrderedDict[_Entry, None]  # the entries that wait, in order; each can leave in constant time


class Place:
    """The places that a caller holds until it leaves. Any thread may call `leave`; a further call does nothing."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: list[Callable[[], None]] = [leave]

    def leave(self) -> None:
        try:
            leave = self._leave.pop()  # only one thread gets it
        except IndexError:
            return
        leave()


class FairQueue:
    """Gives a number of places to the keys that wait for them. Any thread and any event loop may use it.

    The next place goes to the key that holds the fewest; of these, to the key whose turn was longest ago. The requests
    of one key take turns in the same way. A caller that needs many places is not overtaken indefinitely.
    """

    def __init__(self, num_places: int, per_key: int | None = None) -> None:
        """`per_key`: the most places that one key may hold, even if others are free; by default all of them."""
        self.num_places = num_places
        self._per_key = num_places if per_key is None else per_key
        self._held: Counter[Hashable] = Counter()  # places by key
        self._first: _Line = OrderedDict()
        self._waiting: OrderedDict[Hashable, OrderedDict[Hashable, _Line]] = OrderedDict()  # by key and request
        self._closed: Callable[[], Exception] | None = None
        self._lock = threading.Lock()

    @property
    def num_taken(self) -> int:
        return self._held.total()

    def has_room(self, number: int) -> bool:
        """Return whether this number of places can be taken without waiting."""
        return not self._waiting and self.num_taken + number <= self.num_places

    def ask(
        self, key: Hashable, request: Hashable = None, number: int = 1, *, is_first: bool = False
    ) -> "Future[Place]":
        """Queue for places. The future is done once the places are free. Cancel the future to leave the queue.

        `number`: at most `num_places`. `is_first`: before all others that wait, of any key.
        Raises the error of `close`.
        """
        entry = _Entry(key, request, number, is_first)
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            line = self._first
            if not is_first:
                line = self._waiting.setdefault(key, OrderedDict()).setdefault(request, OrderedDict())
            line[entry] = None
        self._serve()
        entry.given.add_done_callback(lambda given: self._left(entry) if given.cancelled() else None)
        return entry.given

    def wait(self, key: Hashable, timeout_s: float) -> Place:
        """Wait on this thread. Raises TimeoutError, and the error of `close`."""
        asked = self.ask(key)
        try:
            return asked.result(timeout_s)
        except TimeoutError:
            _give_up(asked)
            raise

    async def enter(self, key: Hashable, request: Hashable = None, number: int = 1, *, is_first: bool = False) -> Place:
        """Wait on an event loop. Raises the error of `close`."""
        asked = self.ask(key, request, number, is_first=is_first)
        if asked.done():
            return asked.result()
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            _give_up(asked)
            raise

    @asynccontextmanager
    async def hold(self, key: Hashable, request: Hashable = None, number: int = 1) -> AsyncIterator[None]:
        """Hold the places in the block. Raises the error of `close`."""
        place = await self.enter(key, request, number)
        try:
            yield
        finally:
            place.leave()

    def close(self, error: Callable[[], Exception]) -> None:
        """Fail everything that waits, and everything that asks from now on. Places that were given stay."""
        with self._lock:
            self._closed = error
            lines = [line for requests in self._waiting.values() for line in requests.values()]
            waiting = [entry for line in (self._first, *lines) for entry in line]
            self._first.clear()
            self._waiting.clear()
        for entry in waiting:
            if entry.given.set_running_or_notify_cancel():
                entry.given.set_exception(error())

    def _serve(self) -> None:
        """Give the free places to those whose turn it is. Their callbacks run without the lock."""
        served: list[_Entry] = []
        with self._lock:
            while (entry := self._next()) is not None:
                self._remove(entry)
                if entry.given.set_running_or_notify_cancel():
                    self._held[entry.key] += entry.number
                    served.append(entry)
        for entry in served:
            entry.given.set_result(Place(partial(self._give_back, entry)))

    def _next(self) -> _Entry | None:
        """Return the next entry in turn; None if it has to wait for places."""
        heads = [next(iter(next(iter(requests.values())))) for requests in self._waiting.values()]
        heads = [head for head in heads if self._held[head.key] + head.number <= self._per_key]
        fewest = min(heads, key=lambda head: self._held[head.key], default=None)
        entry = next(iter(self._first), fewest)
        return entry if entry is not None and self.num_taken + entry.number <= self.num_places else None

    def _remove(self, entry: _Entry) -> None:
        """Remove an entry that waits. The next turns of its key and of its request come after those of all others."""
        if entry.is_first:
            del self._first[entry]
            return
        requests = self._waiting[entry.key]
        del requests[entry.request][entry]
        requests.move_to_end(entry.request)
        if not requests[entry.request]:
            del requests[entry.request]
        self._waiting.move_to_end(entry.key)
        if not requests:
            del self._waiting[entry.key]

    def _left(self, entry: _Entry) -> None:
        """Remove an entry whose caller waits no longer. Entries behind it may fit now."""
        with self._lock:
            if entry in self._first or entry in self._waiting.get(entry.key, OrderedDict()).get(entry.request, ()):
                self._remove(entry)
        self._serve()

    def _give_back(self, entry: _Entry) -> None:
        with self._lock:
            self._held[entry.key] -= entry.number
            if not self._held[entry.key]:
                del self._held[entry.key]
            if entry.key in self._waiting:
                self._waiting.move_to_end(entry.key)
        self._serve()


def _give_up(asked: "Future[Place]") -> None:
    """Leave the queue, or the place if it was given just now."""
    if not asked.cancel():
        asked.add_done_callback(lambda given: None if given.exception() else given.result().leave())


class FairThreads:
    """Threads that serve the keys in turn."""

    def __init__(self, num_threads: int, name: str, per_key: int | None = None) -> None:
        """`per_key` is as in FairQueue."""
        self._queue = FairQueue(num_threads, per_key)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], key: Hashable, request: Hashable = None, *, is_first: bool = False) -> T:
        """Run `work` on a thread. The thread counts as used until `work` ends, even if the caller leaves before.

        Work whose caller leaves before it begins is dropped. Raises the errors of `work`.
        """
        place = await self._queue.enter(key, request, is_first=is_first)
        try:
            running = self._pool.submit(work)
        except RuntimeError:  # after `close`
            place.leave()
            raise
        running.add_done_callback(lambda _: place.leave())
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Start no more work. Running functions continue to their end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
