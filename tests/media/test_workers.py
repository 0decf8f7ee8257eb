"""Requests take turns on a few threads; what nobody waits for is not begun."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from vllm_mlx.core.errors import Cancelled
from vllm_mlx.core.tasks import Deadline
from vllm_mlx.media.limits import Workers


def request() -> Deadline:
    return Deadline(60, "")


@asynccontextmanager
async def busy(workers: Workers) -> AsyncIterator[None]:
    """Its only thread is at work for another request."""
    free = threading.Event()
    working = asyncio.create_task(workers.run(request(), free.wait))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        free.set()
        await working


async def begin(workers: Workers, owner: Deadline, done: list[str], name: str) -> "asyncio.Task[None]":
    task = asyncio.create_task(workers.run(owner, lambda: done.append(name)))
    await asyncio.sleep(0)
    return task


def test_a_request_with_much_work_lets_the_others_in_between() -> None:
    async def main() -> list[str]:
        workers, large, small, done = Workers(1, "test"), request(), request(), list[str]()
        async with busy(workers):
            tasks = [await begin(workers, large, done, f"large {number}") for number in range(4)]
            tasks += [await begin(workers, small, done, f"small {number}") for number in range(2)]
        await asyncio.gather(*tasks)
        workers.close()
        return done

    assert asyncio.run(main()) == ["large 0", "small 0", "large 1", "small 1", "large 2", "large 3"]


def test_one_request_alone_has_all_threads() -> None:
    async def main() -> None:
        workers, met = Workers(3, "test"), threading.Barrier(3)
        alone = request()
        await asyncio.gather(*(workers.run(alone, lambda: met.wait(10)) for _ in range(3)))
        workers.close()

    asyncio.run(main())


def test_work_of_a_client_that_has_left_is_not_begun() -> None:
    async def main() -> list[str]:
        workers, left, cancelled, done = Workers(1, "test"), request(), request(), list[str]()
        async with busy(workers):
            leaving = await begin(workers, left, done, "left")
            ending = await begin(workers, cancelled, done, "cancelled")
            staying = await begin(workers, request(), done, "stayed")
            leaving.cancel()
            cancelled.cancel()
        with pytest.raises(Cancelled):
            await ending
        await staying
        workers.close()
        return done

    assert asyncio.run(main()) == ["stayed"]


def test_a_place_that_came_to_one_who_just_left_goes_on_to_the_next() -> None:
    async def main() -> list[str]:
        workers, done = Workers(1, "test"), list[str]()
        turns = workers._turns
        await turns._enter(request(), 1)
        leaving = await begin(workers, request(), done, "left")
        staying = await begin(workers, request(), done, "stayed")
        turns._leave(1)  # the place is the leaving one's, which has not run since
        leaving.cancel()
        await staying
        workers.close()
        return done

    assert asyncio.run(main()) == ["stayed"]
