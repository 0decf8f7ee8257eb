"""What requests with images and videos share: pixels in memory and bytes of files."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from ..core.errors import InvalidImage, Overloaded
from ..core.fair_queue import FairQueue, FairThreads
from ..core.tasks import Deadline
from .sources import megabytes

T = TypeVar("T")

_SMALL_SHARE = 8  # a request with at most an eighth of all pixels is small
_FETCHES_PER_REQUEST = 4
_MAX_REQUEST_BYTES = 256 * 1024 * 1024  # the files of one request together; a request body has the same limit
MAX_FILES_BYTES = 4 * _MAX_REQUEST_BYTES  # all files that are not decoded yet
_RETRY_S = 5.0


class PixelGate:
    """A limit on pixels in memory. Used on one event loop.

    Small requests never wait for large ones: they have another eighth of `max_pixels` to themselves.
    """

    def __init__(self, max_pixels: int):
        self._main = FairQueue(max_pixels)
        self._small = FairQueue(max_pixels // _SMALL_SHARE)

    @property
    def num_pixels(self) -> int:
        """Pixels in memory now."""
        return self._main.num_taken + self._small.num_taken

    @asynccontextmanager
    async def hold(self, num_pixels: int, tenant: str = "") -> AsyncIterator[None]:
        """Wait until the pixels fit, and count them as in memory in the block. `num_pixels` is at most `max_pixels`."""
        is_small = num_pixels <= self._small.num_places
        lane = self._small if is_small and not self._main.has_room(num_pixels) else self._main
        async with lane.hold(tenant, number=num_pixels):
            yield


class ByteRoom:
    """A byte budget that all requests share. Safe to share between threads."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._lock = threading.Lock()

    def enter(self, num_bytes: int) -> bool:
        """Whether there was room."""
        with self._lock:
            has_room = self.num_bytes + num_bytes <= self.max_bytes
            self.num_bytes += num_bytes if has_room else 0
            return has_room

    def leave(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= num_bytes


class Allowance:
    """How much one request may still fetch and hold, and to whom it belongs. Used on one event loop."""

    def __init__(self, fetch_until_s: float, deadline: Deadline, salt: str, room: ByteRoom, tenant: str = "") -> None:
        """`fetch_until_s`: a time of the event loop's clock; `deadline`: the end of all preparation of the request.

        `room`: the budget for the files of all requests.
        """
        self.fetch_until_s = fetch_until_s
        self.deadline = deadline
        self.tenant = tenant
        self.salt = salt.encode("utf-8", "surrogatepass")  # requests of different salts share no cached media
        self.fetches = asyncio.Semaphore(_FETCHES_PER_REQUEST)
        self._room = room
        self._num_bytes = 0

    async def run(self, threads: FairThreads, work: Callable[[], T]) -> T:
        """Run `work` when it is this request's turn. Raises what it raises, and what the deadline raises: then it did
        not start.
        """
        return await threads.run(partial(_in_time, self.deadline, work), self.tenant, self.deadline)

    def take(self, num_bytes: int) -> None:
        """Hold a file until `give_back`. Raises InvalidImage, or Overloaded if other requests hold too much."""
        if self._num_bytes + num_bytes > _MAX_REQUEST_BYTES:
            raise InvalidImage(
                f"with it, the files of this request have more than {megabytes(_MAX_REQUEST_BYTES)}. Send fewer, or "
                "smaller ones."
            )
        if not self._room.enter(num_bytes):
            message = "Running requests hold too many bytes of image and video files. Send this request again later."
            raise Overloaded(message, retry_after_s=_RETRY_S)
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        self._room.leave(self._num_bytes)
        self._num_bytes = 0


def _in_time(deadline: Deadline, work: Callable[[], T]) -> T:
    deadline.check()
    return work()
