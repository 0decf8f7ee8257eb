"""How many pixels are in memory at once, over all requests. Knows no images."""

import asyncio
from collections import deque


class PixelGate:
    """First come, first served: a large request is not overtaken for ever by small ones. Used on one event loop."""

    def __init__(self, max_pixels: int):
        self._max_pixels = self._free = max_pixels
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def num_pixels(self) -> int:
        """In memory now."""
        return self._max_pixels - self._free

    async def enter(self, num_pixels: int) -> None:
        """Waits until they fit; `num_pixels` is at most all there are. Unless it is cancelled, `leave` must follow."""
        if not self._waiting and num_pixels <= self._free:
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
