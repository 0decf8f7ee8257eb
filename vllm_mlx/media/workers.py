"""A thread pool in which requests take turns, so that one with much work does not hold up the others."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from ..core.tasks import Deadline

T = TypeVar("T")


class Workers:
    """Used on one event loop. The deadline identifies the request: every request has one of its own."""

    def __init__(self, num_threads: int, name: str):
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._turns = _Turns(num_threads)

    async def run(self, deadline: Deadline, function: Callable[[], T]) -> T:
        """Run `function` on a thread. Raises what it raises, and what the deadline raises: then it did not start."""
        async with self._turns.turn(deadline):
            return await asyncio.get_running_loop().run_in_executor(self._pool, _in_time, deadline, function)

    def close(self) -> None:
        """Start no more work. Running functions go on to their end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Turns:
    """Places that requests get in rotation, however many one of them asks for."""

    def __init__(self, num_places: int):
        self._num_free = num_places
        self._waiting: OrderedDict[Deadline, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, request: Deadline) -> AsyncIterator[None]:
        await self._enter(request)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, request: Deadline) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # the place was given just before the cancellation
                self._leave()
            raise

    def _leave(self) -> None:
        """Give the place to the next request, whose turn then comes last again."""
        while self._waiting:
            request, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[request] = places
            if not place.cancelled():
                place.set_result(None)
                return
        self._num_free += 1


def _in_time(deadline: Deadline, function: Callable[[], T]) -> T:
    deadline.check()
    return function()
