"""How many pixels are in memory at once, over all requests. Knows no images."""

import asyncio
from collections import deque

_SMALL_SHARE = 8  # a request with at most one part in so many of all pixels is small


class PixelLane:
    """First come, first served: a large request is not overtaken for ever by small ones."""

    def __init__(self, max_pixels: int):
        self.max_pixels = self._free = max_pixels
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def num_pixels(self) -> int:
        """In memory now."""
        return self.max_pixels - self._free

    def has_room(self, num_pixels: int) -> bool:
        """Whether they may enter at once."""
        return not self._waiting and num_pixels <= self._free

    async def enter(self, num_pixels: int) -> None:
        """Waits until they fit; `num_pixels` is at most all there are. Unless it is cancelled, `leave` must follow."""
        if self.has_room(num_pixels):
            self._free -= num_pixels
            return
        turn = (asyncio.get_running_loop().create_future(), num_pixels)
        self._waiting.append(turn)
        try:
            await turn[0]
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:
                self._free += num_pixels
            self._admit()
            raise

    def leave(self, num_pixels: int) -> None:
        self._free += num_pixels
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][1] <= self._free:
            admitted, num_pixels = self._waiting.popleft()
            self._free -= num_pixels
            if not admitted.done():
                admitted.set_result(None)
            # One that was cancelled meanwhile gives back what it got, in `enter`.


class PixelGate:
    """Used on one event loop. Small requests never wait for large ones: an eighth beyond `max_pixels` is theirs."""

    def __init__(self, max_pixels: int):
        self._main = PixelLane(max_pixels)
        self._small = PixelLane(max_pixels // _SMALL_SHARE)

    @property
    def num_pixels(self) -> int:
        """In memory now."""
        return self._main.num_pixels + self._small.num_pixels

    async def enter(self, num_pixels: int) -> PixelLane:
        """The lane that they entered, and have to leave. `num_pixels` is at most `max_pixels`."""
        is_small = num_pixels <= self._small.max_pixels
        lane = self._small if is_small and not self._main.has_room(num_pixels) else self._main
        await lane.enter(num_pixels)
        return lane
