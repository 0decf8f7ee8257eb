"""Pixels in memory at once: large requests wait for their turn, small ones do not wait for large ones."""

import asyncio

from vllm_mlx.media.loader import PixelGate


class Holder:
    """A request that holds pixels once it is let in."""

    def __init__(self, gate: PixelGate, num_pixels: int) -> None:
        self._entered = asyncio.Event()
        self._leaving = asyncio.Event()
        self._task = asyncio.create_task(self._run(gate, num_pixels))

    async def _run(self, gate: PixelGate, num_pixels: int) -> None:
        async with gate.hold(num_pixels):
            self._entered.set()
            await self._leaving.wait()

    async def is_in(self) -> bool:
        for _ in range(5):
            await asyncio.sleep(0)
        return self._entered.is_set()

    async def leave(self) -> None:
        self._leaving.set()
        await self._task


def test_a_small_request_does_not_wait_behind_large_ones() -> None:
    async def main() -> None:
        gate = PixelGate(800)
        first, large, small = (Holder(gate, number) for number in (700, 500, 60))
        assert await small.is_in() and gate.num_pixels == 760 and not await large.is_in()
        await first.leave()
        assert await large.is_in()
        await large.leave()
        await small.leave()
        assert gate.num_pixels == 0

    asyncio.run(main())


def test_small_requests_wait_for_each_other_once_their_share_is_used() -> None:
    async def main() -> None:
        gate = PixelGate(800)
        large, first, second = (Holder(gate, number) for number in (800, 100, 100))
        assert await first.is_in() and not await second.is_in() and gate.num_pixels == 900
        await first.leave()
        assert await second.is_in()
        await second.leave()
        await large.leave()

    asyncio.run(main())


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    async def main() -> None:
        gate = PixelGate(800)
        first, large, another = (Holder(gate, number) for number in (700, 800, 200))
        assert await first.is_in()
        await first.leave()
        assert await large.is_in() and not await another.is_in()
        await large.leave()
        await another.leave()

    asyncio.run(main())
