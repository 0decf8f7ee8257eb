"""The threads that prepare prompts: whose turn it is, and what becomes of work that nobody waits for."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable

import pytest

from tests.support.running import eventually
from vllm_mlx.core.errors import Cancelled, Overloaded, TimeLimit
from vllm_mlx.engine import preparing
from vllm_mlx.engine.preparing import MAX_HUNG, TENANT_THREADS, PromptPool
from vllm_mlx.util.tasks import Deadline


class Jobs:
    """Work that runs until it is told to end, by name."""

    def __init__(self, pool: PromptPool) -> None:
        self.pool = pool
        self.begun: list[str] = []
        self._ends: dict[str, threading.Event] = {}

    def ask(
        self, name: str, tenant: str = "", *, is_long: bool = False, deadline: Deadline | None = None
    ) -> "asyncio.Task[str]":
        self._ends[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            assert self._ends[name].wait(120)
            return name

        running = self.pool.run(work, tenant=tenant, deadline=deadline, is_long=is_long)
        return asyncio.get_running_loop().create_task(running)

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    async def until_begun(self, *names: str) -> None:
        while not set(names) <= set(self.begun):
            await asyncio.sleep(0.001)


def with_jobs(check: Callable[[Jobs], Awaitable[None]]) -> None:
    async def main() -> None:
        jobs = Jobs(PromptPool())
        try:
            await check(jobs)
        finally:
            jobs.end(*jobs._ends)
            jobs.pool.shutdown()

    asyncio.run(main())


def test_a_watcher_learns_when_the_first_job_starts_and_when_the_last_one_ends() -> None:
    async def check(jobs: Jobs) -> None:
        changes: list[bool] = []
        jobs.pool.watch(changes.append)
        first, second = jobs.ask("a"), jobs.ask("b")
        await jobs.until_begun("a", "b")
        jobs.end("a")
        assert await first == "a"
        assert changes == [True]
        jobs.end("b")
        assert await second == "b"
        await asyncio.to_thread(eventually, lambda: changes == [True, False])

    with_jobs(check)


def test_one_tenant_has_two_threads_in_order_of_arrival() -> None:
    async def check(jobs: Jobs) -> None:
        tasks = [jobs.ask(name) for name in "abcd"]
        await jobs.until_begun("a", "b")
        assert TENANT_THREADS == 2 and jobs.begun == ["a", "b"]
        jobs.end("b")
        await jobs.until_begun("c")
        assert "d" not in jobs.begun
        jobs.end(*"acd")
        assert await asyncio.gather(*tasks) == [*"abcd"]

    with_jobs(check)


def test_nobody_waits_behind_another_tenants_prompts() -> None:
    async def check(jobs: Jobs) -> None:
        for number in range(20):
            jobs.ask(f"ann {number}", "ann", is_long=number % 2 == 0)
        own = {"ann 0", "ann 1", "ann 3"}
        await jobs.until_begun(*own)
        jobs.ask("ben", "ben", is_long=True)
        await jobs.until_begun("ben")
        assert set(jobs.begun) == {*own, "ben"}

    with_jobs(check)


def test_short_prompts_do_not_wait_behind_long_ones() -> None:
    async def check(jobs: Jobs) -> None:
        for name in ("long 1", "long 2", "long 3"):
            jobs.ask(name, is_long=True)
        jobs.ask("short")
        await jobs.until_begun("long 1", "short")
        assert set(jobs.begun) == {"long 1", "short"}
        jobs.end("long 1")
        await jobs.until_begun("long 2")

    with_jobs(check)


def test_tenants_take_turns_where_threads_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "MAX_THREADS", 1)

    async def check(jobs: Jobs) -> None:
        asked = [("ann 1", "ann"), ("ann 2", "ann"), ("ann 3", "ann"), ("ben 1", "ben"), ("ben 2", "ben")]
        tasks = [jobs.ask(*each) for each in asked]
        order = ["ann 1", "ben 1", "ann 2", "ben 2", "ann 3"]
        for name in order:
            await jobs.until_begun(name)
            jobs.end(name)
        await asyncio.gather(*tasks)
        assert jobs.begun == order

    with_jobs(check)


def test_work_whose_caller_left_never_begins() -> None:
    async def check(jobs: Jobs) -> None:
        jobs.ask("a"), jobs.ask("b")
        await jobs.until_begun("a", "b")
        left = jobs.ask("left")
        stayed = jobs.ask("stayed")
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        jobs.end("a", "stayed")
        assert await stayed == "stayed"
        assert "left" not in jobs.begun

    with_jobs(check)


def test_waiting_counts_towards_the_deadline() -> None:
    async def check(jobs: Jobs) -> None:
        jobs.ask("a"), jobs.ask("b")
        with pytest.raises(TimeLimit, match="too slow"):
            await jobs.ask("late", deadline=Deadline(0.01, "too slow"))
        jobs.end("a")
        following = jobs.ask("following")
        jobs.end("following")
        await following
        assert "late" not in jobs.begun

    with_jobs(check)


def test_work_that_was_given_up_ends_before_it_begins() -> None:
    async def check(jobs: Jobs) -> None:
        deadline = Deadline(math.inf, "")
        deadline.cancel()
        with pytest.raises(Cancelled):
            await jobs.ask("given up", deadline=deadline)
        assert not jobs.begun

    with_jobs(check)


def test_work_that_has_not_started_is_refused_at_shutdown() -> None:
    async def check(jobs: Jobs) -> None:
        running = jobs.ask("a"), jobs.ask("b")
        await jobs.until_begun("a", "b")
        waiting = jobs.ask("waiting")
        await asyncio.sleep(0)
        jobs.pool.shutdown()
        with pytest.raises(Overloaded, match="shutting down"):
            await waiting
        with pytest.raises(Overloaded, match="shutting down"):
            await jobs.ask("late")
        jobs.end("a", "b")
        assert await asyncio.gather(*running) == ["a", "b"]

    with_jobs(check)


def test_work_that_waits_for_a_thread_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_WITHOUT_DEADLINE_S", 0.0)
    monkeypatch.setattr(preparing, "HANG_SLACK_S", 0.0)
    monkeypatch.setattr(preparing, "MAX_THREADS", 1)

    async def check(jobs: Jobs) -> None:
        first = jobs.ask("first", deadline=Deadline(60, ""))
        await jobs.until_begun("first")
        waiting = jobs.ask("waiting")
        await asyncio.sleep(0.01)
        monkeypatch.setattr(preparing, "_WITHOUT_DEADLINE_S", 60.0)
        jobs.end("first")
        await jobs.until_begun("waiting")
        assert jobs.pool.error() is None
        jobs.end("waiting")
        await asyncio.gather(first, waiting)

    with_jobs(check)


def test_a_hung_thread_is_replaced_and_told_once_and_many_of_them_are_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preparing, "HANG_SLACK_S", 0.0)
    monkeypatch.setattr(preparing, "_LOOK_S", 0.01)

    async def check(jobs: Jobs) -> None:
        for number in range(MAX_HUNG):
            now_s = [0.0]
            deadline = Deadline(0.05, "too slow", clock=lambda now_s=now_s: now_s[0])
            task = jobs.ask(f"hangs {number}", deadline=deadline)
            await jobs.until_begun(f"hangs {number}")
            now_s[0] = 1.0
            await asyncio.gather(task, return_exceptions=True)
            assert isinstance(task.exception(), TimeLimit)
            if number < MAX_HUNG - 1:
                assert jobs.pool.error() is None
                after = jobs.ask(f"works {number}")
                await jobs.until_begun(f"works {number}")
                jobs.end(f"works {number}")
                assert await after
        while (error := jobs.pool.error()) is None:  # the last one begins to count as hung
            await asyncio.sleep(0.001)
        assert "8 threads that prepare prompts hang" in error
        assert jobs.pool.error() is not None
        jobs.end("hangs 0")
        eventually(lambda: jobs.pool.error() is None)

    with_jobs(check)
    assert caplog.text.count("A thread that prepares a prompt hangs") == MAX_HUNG


def test_a_failure_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def check(jobs: Jobs) -> None:
        done = jobs.pool.submit(lambda: 1 / 0)
        assert isinstance(await asyncio.to_thread(done.exception, 60), ZeroDivisionError)
        eventually(lambda: "Background work has failed" in caplog.text)

    with_jobs(check)
    assert "ZeroDivisionError" in caplog.text
