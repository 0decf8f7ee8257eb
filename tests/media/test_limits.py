"""Pixels in memory at once: large requests wait for their turn, small ones do not wait for large ones."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from vllm_mlx.media.limits import PixelGate, PixelLane


async def begun(work: Coroutine[Any, Any, PixelLane]) -> "asyncio.Task[PixelLane]":
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


def test_a_small_request_does_not_wait_behind_large_ones() -> None:
    async def main() -> None:
        gate = PixelGate(800)
        lane = await gate.enter(700)
        large = await begun(gate.enter(500))
        small = await asyncio.wait_for(gate.enter(60), 1)
        assert gate.num_pixels == 760 and not large.done()
        lane.leave(700)
        (await large).leave(500)
        small.leave(60)
        assert gate.num_pixels == 0

    asyncio.run(main())


def test_small_requests_wait_for_each_other_once_their_share_is_used() -> None:
    async def main() -> None:
        gate = PixelGate(800)
        await gate.enter(800)
        first = await gate.enter(100)
        second = await begun(gate.enter(100))
        assert not second.done() and gate.num_pixels == 900
        first.leave(100)
        await second

    asyncio.run(main())


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    async def main() -> None:
        gate = PixelGate(800)
        lane = await gate.enter(700)
        large, another = await begun(gate.enter(800)), await begun(gate.enter(200))
        lane.leave(700)
        await asyncio.sleep(0)
        assert large.done() and not another.done()

    asyncio.run(main())
