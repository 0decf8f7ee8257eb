"""The engine behind its asynchronous front: streams, stop strings, clients that leave, shutdown, death."""

import asyncio
import gc
import logging

import mlx.core as mx
import pytest

from tests.support.rows import row
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ContextLengthExceeded, EngineDead, InvalidParameter, ShuttingDown
from vllm_mlx.core.events import Failed, Finished, FinishReason, PromptProgress, TextDelta
from vllm_mlx.core.request import Request, SamplingParams
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.formats.pipeline import OutputPipeline


@pytest.fixture(scope="module")
def engine(checkpoint):
    config = EngineConfig(
        model=str(checkpoint("qwen3")), memory_budget_bytes=2 << 30, max_model_len=1024, max_queue=1000
    )
    engine = start_engine(config)
    yield engine
    asyncio.run(engine.shutdown(0))


def request(prompt="Hello world", **sampling) -> Request:
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **sampling}
    return Request(request_id="r", prompt=prompt, sampling=SamplingParams(**settings))


async def collect(engine: EngineClient, asked: Request) -> list:
    async with await engine.submit(asked) as generation:
        return [event async for event in generation]


def text_of(events: list, index: int = 0) -> str:
    return "".join(event.text for at, event in events if at == index and isinstance(event, TextDelta))


def last(events: list) -> Finished:
    return events[-1][1]


async def until_idle(engine: EngineClient) -> None:
    """Rows that are left on the device are a hang, which ends the test."""
    while await engine.ask(lambda asked: asked.num_rows):
        await asyncio.sleep(0.01)


async def until_running(engine: EngineClient, *tasks: "asyncio.Task[list]") -> None:
    """Wait until rows run, or one of the tasks has ended already, for which this thread may have come too late."""
    while not await engine.ask(lambda asked: asked.num_rows) and not any(task.done() for task in tasks):
        await asyncio.sleep(0.001)


def test_every_stop_string_cuts_the_reply_at_its_first_occurrence(engine):
    whole = text_of(asyncio.run(collect(engine, request())))
    for start in range(len(whole) - 2):
        stop = whole[start : start + 3]
        events = asyncio.run(collect(engine, request(stop=(stop,))))
        assert text_of(events) == whole[: whole.index(stop)]
        assert last(events).reason is FinishReason.STOP
        assert last(events).stop == stop
        assert last(events).usage.completion_tokens <= 12
    asyncio.run(until_idle(engine))


def test_a_stop_token_of_the_request_ends_the_reply_without_its_text_and_is_named(engine):
    async def stopped(*ids: int) -> tuple[list, tuple[int, ...]]:
        asked = request("x", stop_token_ids=ids, temperature=1.5, seed=3)
        async with await engine.submit(asked) as generation:
            events = [event async for event in generation]
        [reply] = generation.by_sequence.values()
        return events, tuple(reply.finished.token_ids)

    async def run() -> None:
        events, ids = await stopped()
        at = next(place for place in range(3, len(ids)) if ids[place] not in ids[:place])
        cut, kept = await stopped(ids[at])
        assert kept == ids[: at + 1] and last(cut).reason is FinishReason.STOP and last(cut).stop == ids[at]
        assert text_of(events).startswith(text_of(cut))
        assert text_of(cut) == text_of(await collect(engine, request("x", max_tokens=at, temperature=1.5, seed=3)))

    asyncio.run(run())


def test_a_request_that_does_not_fit_is_refused_and_one_that_barely_fits_is_clamped(engine):
    with pytest.raises(ContextLengthExceeded):
        asyncio.run(collect(engine, request(prompt=tuple([5] * 1024))))
    usage = last(asyncio.run(collect(engine, request(prompt=tuple([5] * 1018), max_tokens=32000)))).usage
    assert usage.completion_tokens == 6
    assert usage.clamped_max_tokens == 6
    with pytest.raises(InvalidParameter):
        asyncio.run(collect(engine, request(prompt=(5, 99999))))


def test_a_slow_reader_gets_the_same_text_in_fewer_deltas(engine):
    async def late() -> list:
        async with await engine.submit(request(max_tokens=60)) as generation:
            while not any(update.finish_reason for update in generation._updates):
                await asyncio.sleep(0.01)
            return [event async for event in generation]

    events = asyncio.run(late())
    assert text_of(events) == text_of(asyncio.run(collect(engine, request(max_tokens=60))))
    assert sum(isinstance(event, TextDelta) for _, event in events) == 1


def test_long_prompts_report_progress(engine):
    events = asyncio.run(collect(engine, request(prompt=tuple([7] * 1000))))
    progress = [event.num_computed_tokens for _, event in events if isinstance(event, PromptProgress)]
    assert progress == sorted(progress)
    assert all(0 < done < 1000 for done in progress)


@row("S4-35")
@pytest.mark.parametrize("asked", [{}, {"stop": ("e",)}, {"n": 2}], ids=str)
def test_who_leaves_at_the_last_event_has_aborted_nothing(engine, asked):
    async def read() -> tuple[dict, dict]:
        before = (await engine.status())["outcomes"]
        num_open = asked.get("n", 1)
        async with await engine.submit(request(**asked)) as generation:
            async for _, event in generation:
                num_open -= isinstance(event, Finished)
                if not num_open:
                    break
        await until_idle(engine)
        return before, (await engine.status())["outcomes"]

    before, after = asyncio.run(read())
    assert after["aborted"] == before["aborted"]
    assert sum(after.values()) - sum(before.values()) == asked.get("n", 1)


@row("S4-10")
@pytest.mark.parametrize("when", ["while the prompt is prepared", "while rows run"])
def test_a_cancelled_task_leaves_no_row_and_no_error(engine, caplog, when):
    errors = []

    async def run() -> tuple[dict, dict]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        before = (await engine.status())["outcomes"]
        for asked in ({}, {"n": 3}, {"prompt": "a long prompt " * 100}):
            task = asyncio.create_task(collect(engine, request(max_tokens=1000, **asked)))
            await (asyncio.sleep(0) if when == "while the prompt is prepared" else until_running(engine, task))
            if task.cancel():  # it has not ended
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until_idle(engine)
        del task
        gc.collect()  # a task that nothing waits for reports its error now
        await asyncio.sleep(0)
        return before, (await engine.status())["outcomes"]

    with caplog.at_level(logging.WARNING):
        before, after = asyncio.run(run())
    assert errors == [] and caplog.records == []
    assert after["failed"] == before["failed"] and engine.is_healthy and not engine.generations


def test_shutdown_drains_then_fails_what_is_left(checkpoint):
    engine = start_engine(EngineConfig(model=str(checkpoint("llama")), memory_budget_bytes=2 << 30))

    async def run() -> None:
        short = asyncio.create_task(collect(engine, request(max_tokens=20)))
        long = asyncio.create_task(collect(engine, request(max_tokens=60_000)))
        await until_running(engine)
        draining = asyncio.create_task(engine.shutdown(drain_s=600))
        assert isinstance(last(await short), Finished)
        with pytest.raises(ShuttingDown):
            await engine.submit(request())
        assert not draining.done() and not long.done()
        await engine.shutdown(drain_s=0)
        cut = (await long)[-1][1]
        assert isinstance(cut, Failed) and isinstance(cut.error, ShuttingDown)
        await draining

    asyncio.run(run())


def test_a_reply_that_finds_no_room_in_the_cache_is_counted(checkpoint):
    engine = start_engine(
        EngineConfig(model=str(checkpoint("llama")), memory_budget_bytes=2 << 30, cache_memory_bytes=20_000)
    )

    async def run() -> list[int]:
        counts = []
        for number in range(3):
            counts.append((await engine.status())["cache"]["inserts_refused"])
            await collect(engine, request(prompt=(number, *range(100))))
        await engine.shutdown(0)
        return counts

    first, second, third = asyncio.run(run())
    assert first == 0 < second < third


def test_a_dead_engine_thread_fails_what_waits_and_what_comes(checkpoint, monkeypatch):
    engine = start_engine(EngineConfig(model=str(checkpoint("llama")), memory_budget_bytes=2 << 30))

    def die(self):
        raise KeyboardInterrupt

    async def run() -> None:
        async with await engine.submit(request(max_tokens=60_000)) as generation:
            events = aiter(generation)
            await anext(events)
            monkeypatch.setattr(LLMEngine, "step", die)
            rest = [event async for _, event in events]
        assert isinstance(rest[-1], Failed)
        assert isinstance(rest[-1].error, EngineDead)
        assert not engine.is_healthy
        assert "Restart" in engine.error()
        with pytest.raises(EngineDead):
            await engine.submit(request())

    asyncio.run(run())


def test_whoever_stops_waiting_for_the_status_harms_nobody(engine):
    async def run():
        reply = asyncio.create_task(collect(engine, request(tuple(range(900)), max_tokens=20)))
        await until_running(engine, reply)
        asked = [asyncio.create_task(engine.status()) for _ in range(5)]
        await asyncio.sleep(0)
        for each in asked:
            each.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*asked, return_exceptions=True)
        )
        return await reply

    assert last(asyncio.run(run())).reason is FinishReason.LENGTH
    assert engine.is_healthy


def test_after_shutdown_late_readers_read_and_late_questions_are_refused(checkpoint):
    async def run():
        engine = start_engine(EngineConfig(model=str(checkpoint("qwen3")), memory_budget_bytes=2 << 30))
        async with await engine.submit(request()) as generation:
            while not any(update.finish_reason for update in generation._updates):
                await asyncio.sleep(0.01)
            await engine.shutdown(0)
            events = [event async for event in generation]
        with pytest.raises(EngineDead):
            await asyncio.wait_for(engine.status(), 5)
        return events

    assert last(asyncio.run(run())).reason is FinishReason.LENGTH


@row("S4-5")
def test_an_idle_engine_keeps_no_freed_buffers(engine):
    async def freed_bytes() -> int:
        await collect(engine, request("a long prompt " * 100))
        await until_idle(engine)
        while mx.get_cache_memory():  # a hang ends the test
            await asyncio.sleep(0.01)
        return mx.get_cache_memory()

    assert asyncio.run(freed_bytes()) == 0


def test_a_reply_whose_end_fails_is_counted(engine, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    async def run() -> tuple:
        before = await engine.status()
        with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
            patched.setattr(OutputPipeline, "finish", fail)
            await collect(engine, request())
        await until_idle(engine)
        return before, await engine.status()

    before, after = asyncio.run(run())
    assert after["total_requests_processed"] == before["total_requests_processed"] + 1
    assert after["outcomes"]["aborted"] == before["outcomes"]["aborted"] + 1
