"""The queue before the engine is bounded, in length and in time, and who is refused leaves nothing behind."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import TimeLimit, TooManyRequests
from vllm_mlx.core.events import Failed, Finished
from vllm_mlx.core.request import Request
from vllm_mlx.engine import admission
from vllm_mlx.engine.admission import AdmissionQueue, Refusals
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import start_engine

from .test_client import collect, last, request, until_idle, until_running

LONG = 50_000  # tokens, so that a reply goes on for longer than anything that a test does meanwhile


def started(checkpoint, **settings) -> EngineClient:
    config = EngineConfig(model=str(checkpoint("llama")), memory_budget_bytes=2 << 30, max_model_len=60_000, **settings)
    return start_engine(config)


async def served_at_last(engine: EngineClient) -> list:
    """A short reply. A busy machine may need several attempts within a limit of time."""
    while isinstance(last(events := await collect(engine, request(max_tokens=3))), Failed):
        pass
    return events


def test_a_full_line_refuses_and_those_in_it_are_served(checkpoint):
    engine = started(checkpoint, max_num_seqs=1, max_queue=2)

    async def run() -> list:
        long = asyncio.create_task(collect(engine, request(max_tokens=LONG)))
        await until_running(engine)
        asked = [
            asyncio.create_task(collect(engine, request(prompt=f"number {number}", max_tokens=30)))
            for number in range(7)
        ]
        while sum(task.done() for task in asked) < 5:
            await asyncio.sleep(0.01)
        long.cancel()
        results = await asyncio.gather(*asked, return_exceptions=True)
        await until_idle(engine)
        again = await collect(engine, request())
        gave_way = (await engine.status())["shrinking"]
        assert gave_way["refused"] == 5 and gave_way["waiting"] == gave_way["preemptions"] == 0
        await engine.shutdown(0)
        return [*results, again]

    *results, again = asyncio.run(run())
    refused = [result for result in results if isinstance(result, TooManyRequests)]
    served = [result for result in results if isinstance(result, list)]
    assert len(refused) == 5 and len(served) == 2
    assert all("--max-queue" in error.message and 1 <= error.retry_after_s <= 30 for error in refused)
    assert all(isinstance(last(events), Finished) for events in [*served, again])


def test_waiting_has_an_end_and_running_is_no_waiting(checkpoint):
    engine = started(checkpoint, max_num_seqs=1, max_queue_s=0.3)

    async def run() -> tuple:
        long = asyncio.create_task(collect(engine, request(max_tokens=LONG)))
        await until_running(engine)
        waited = await collect(engine, request())
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await until_idle(engine)
        after = await served_at_last(engine)
        await engine.shutdown(0)
        return waited, after

    waited, after = asyncio.run(run())
    assert isinstance(last(waited), Failed) and isinstance(last(waited).error, TooManyRequests)
    assert "0.3 seconds (--max-queue-s)" in last(waited).error.message
    assert isinstance(last(after), Finished)


def test_a_request_that_takes_too_long_is_ended(checkpoint):
    engine = started(checkpoint, max_request_s=0.3)

    async def run() -> tuple:
        long = await collect(engine, request(max_tokens=LONG))
        await until_idle(engine)
        short = await served_at_last(engine)
        assert not engine.queue.timers, "none outlives its request"
        await engine.shutdown(0)
        return long, short

    long, short = asyncio.run(run())
    assert isinstance(last(long).error, TimeLimit) and "--max-request-s" in last(long).error.message
    assert isinstance(last(short), Finished)


async def places(queue: AdmissionQueue, tenant: str, wanted: int, held: AsyncExitStack, num_choices: int = 1) -> int:
    """How many of the wanted requests of a tenant find a place, which they keep."""
    asked = Request(request_id="r", prompt="Hi", tenant=tenant)
    found = 0
    for _ in range(wanted):
        try:
            await held.enter_async_context(queue.preparing(asked, num_choices))
        except TooManyRequests:
            continue
        found += num_choices
    return found


def found(queue: AdmissionQueue, *asked: tuple) -> list[int]:
    """The places that each of these in turn finds, and all keep."""

    async def run() -> list[int]:
        async with AsyncExitStack() as held:
            return [await places(queue, tenant, wanted, held, *num) for tenant, wanted, *num in asked]

    return asyncio.run(run())


@pytest.fixture
def queue(monkeypatch) -> AdmissionQueue:
    monkeypatch.setattr(admission, "_LONGEST_HOLD_S", 0.0)
    return AdmissionQueue(EngineConfig(model="m", max_num_seqs=2, max_queue=8), list)


def test_refusals_of_a_crowd_are_spread_over_time_and_those_of_another_tenant_are_not_held():
    refusals = Refusals()
    due_s = [refusals.hold_s("ann", 0.0) for _ in range(200)]
    assert due_s[:10] == [0.0] * 10 and due_s == sorted(due_s)
    busiest = max(sum(start <= each < start + 0.25 for each in due_s) for start in due_s)
    assert busiest <= 10 + 6, "they come back as spread out as they left"
    assert due_s[-1] < 10 and refusals.hold_s("ben", 0.0) == 0
    assert refusals.hold_s("ann", 60.0) == 0, "a tenant that waited is answered at once"


def test_no_refusal_is_held_for_long_however_many_there_were():
    refusals = Refusals()
    assert max(refusals.hold_s("ann", number / 1000) for number in range(20_000)) < 30.001


def test_one_tenant_may_fill_the_line_and_no_more(queue):
    assert found(queue, ("ann", 20)) == [10]


def test_a_tenant_finds_its_share_of_a_line_that_another_has_filled(queue):
    assert found(queue, ("ann", 20), ("ben", 20), ("ann", 20), ("eve", 20)) == [10, 5, 0, 3]


def test_a_tenant_with_nothing_in_line_always_finds_room(queue):
    assert found(queue, *((f"tenant {number}", 1) for number in range(30))) == [1] * 30


def test_all_replies_of_a_request_have_to_fit(queue):
    assert found(queue, ("", 1, 4), ("", 1, 7), ("", 1, 6)) == [4, 0, 6]


def test_a_request_of_more_replies_than_the_line_holds_is_served_alone(queue):
    assert found(queue, ("", 1, 12), ("", 1)) == [12, 0]


def test_refusals_of_a_tenant_that_asks_again_at_once_are_held_back():
    queue = AdmissionQueue(EngineConfig(model="m", max_num_seqs=1, max_queue=1), list)

    async def run() -> tuple[int, int]:
        async with AsyncExitStack() as held:
            await places(queue, "ann", 2, held)
            asked = [asyncio.create_task(places(queue, "ann", 1, held)) for _ in range(30)]
            other = asyncio.create_task(places(queue, "ben", 3, held))
            for _ in range(50):
                await asyncio.sleep(0)
            answered = sum(task.done() for task in asked), await other
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            return answered

    assert asyncio.run(run()) == (10, 1), "ten of the one who asks too often at once, and the other's refusals as well"
