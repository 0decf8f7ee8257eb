"""Keys take turns for a few places; what nobody waits for is not begun."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from vllm_mlx.util.fair_queue import FairQueue, FairThreads, Place


class Line:
    """Callers of one queue, and the order in which they got their places."""

    def __init__(self, num_places: int = 1, per_key: int | None = None) -> None:
        self.queue = FairQueue(num_places, per_key)
        self.served: list[str] = []
        self._asked: dict[str, Future[Place]] = {}

    def ask(self, *names: str, **options: bool) -> None:
        """A name begins with its key: "ann", "ann 2", or "ann/b 2" for her request "b"."""
        for name in names:
            key, _, request = name.split(" ")[0].partition("/")
            self._asked[name] = self.queue.ask(key, request, **options)
            self._asked[name].add_done_callback(
                lambda given, name=name: None if given.cancelled() else self.served.append(name)
            )

    def leave(self, *names: str) -> None:
        for name in names:
            self._asked.pop(name).result(0).leave()

    def cancel(self, name: str) -> None:
        assert self._asked.pop(name).cancel()

    def drain(self) -> list[str]:
        """Everybody leaves in order; the names of those that were served."""
        for name in self.served:  # it grows meanwhile
            if name in self._asked:
                self.leave(name)
        return self.served


def test_the_second_key_is_served_before_the_backlog_of_the_first() -> None:
    line = Line()
    line.ask("ann", "ann 2", "ann 3", "ben", "ben 2", "cid")
    assert line.drain() == ["ann", "ben", "cid", "ann 2", "ben 2", "ann 3"]


def test_a_place_goes_to_the_key_that_holds_fewest() -> None:
    line = Line(2)
    line.ask("ann long", "ben", "ann 2", "ben 2", "ann 3", "cid")
    line.leave("ben")
    line.leave("cid")
    line.leave("ben 2")
    assert line.served == ["ann long", "ben", "cid", "ben 2", "ann 2"], "ann holds one place the whole time"


def test_a_key_holds_no_more_than_its_limit() -> None:
    line = Line(3, per_key=2)
    line.ask("ann", "ann 2", "ann 3", "ben")
    assert line.served == ["ann", "ann 2", "ben"]
    line.leave("ben")
    assert line.served == ["ann", "ann 2", "ben"]
    assert line.drain() == ["ann", "ann 2", "ben", "ann 3"]


def test_requests_of_one_key_take_turns() -> None:
    line = Line()
    line.ask("ann/a", "ann/a 2", "ann/a 3", "ann/b", "ann/b 2")
    assert line.drain() == ["ann/a", "ann/a 2", "ann/b", "ann/a 3", "ann/b 2"]


def test_what_comes_first_comes_before_all_keys() -> None:
    line = Line()
    line.ask("ann", "ben")
    line.ask("ann 2", "ann 3", is_first=True)
    assert line.drain() == ["ann", "ann 2", "ann 3", "ben"]


def test_who_leaves_the_queue_gets_no_place_and_keeps_nobody_waiting() -> None:
    line = Line()
    line.ask("ann", "ben", "cid", "ben 2")
    line.cancel("ben")
    line.cancel("ben 2")
    assert line.drain() == ["ann", "cid"]
    assert line.queue.has_room(1)


def test_leaving_a_place_twice_frees_it_once() -> None:
    queue = FairQueue(1)
    place = queue.wait("ann", 10)
    place.leave()
    place.leave()
    assert queue.num_taken == 0 and queue.has_room(1) and not queue.has_room(2)


def test_one_who_needs_many_places_is_not_overtaken_and_lets_others_pass_on_leaving() -> None:
    queue = FairQueue(4)
    first = queue.wait("ann", 10)
    large, small = queue.ask("ben", number=4), queue.ask("cid")
    assert not large.done() and not small.done()
    assert large.cancel()
    assert small.done()
    first.leave()
    small.result(0).leave()
    assert queue.num_taken == 0


def test_closing_fails_all_that_wait_and_all_that_come() -> None:
    queue = FairQueue(1)
    place = queue.wait("ann", 10)
    waiting = queue.ask("ben")
    queue.close(lambda: OSError("closed"))
    with pytest.raises(OSError, match="closed"):
        waiting.result(0)
    with pytest.raises(OSError, match="closed"):
        queue.ask("cid")
    place.leave()


def test_a_thread_waits_so_long_as_it_said() -> None:
    queue = FairQueue(1)
    place = queue.wait("ann", 10)
    with pytest.raises(TimeoutError):
        queue.wait("ben", 0.001)
    place.leave()
    assert queue.has_room(1), "who gave up does not get the place"
    queue.wait("cid", 10).leave()


def test_threads_and_event_loops_that_come_and_go_lose_no_place() -> None:
    queue, most, errors = FairQueue(3, per_key=2), [0], list[BaseException]()

    async def some(key: str) -> None:
        async def one() -> None:
            async with queue.hold(key):
                most[0] = max(most[0], queue.num_taken)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(one()) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def work(key: str) -> None:
        try:
            for _ in range(5):
                asyncio.run(some(key))
                for _ in range(20):
                    queue.wait(key, 60).leave()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(key,)) for key in ("ann", "ben", "cid")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and queue.num_taken == 0 and queue.has_room(3) and 1 <= most[0] <= 3


def test_a_place_that_came_to_one_who_just_left_goes_on_to_the_next() -> None:
    async def main() -> list[str]:
        queue, done = FairQueue(1), list[str]()

        async def take(name: str) -> None:
            async with queue.hold(name):
                done.append(name)

        place = await queue.enter("first")
        leaving, staying = asyncio.create_task(take("left")), asyncio.create_task(take("stayed"))
        await asyncio.sleep(0)
        place.leave()  # the place is the leaving one's, which has not run since
        leaving.cancel()
        await staying
        return done

    assert asyncio.run(main()) == ["stayed"]


def in_threads(check: Callable[[FairThreads], Coroutine[Any, Any, None]], num_threads: int = 1) -> None:
    async def main() -> None:
        threads = FairThreads(num_threads, "test")
        await check(threads)
        threads.close()

    asyncio.run(main())


def test_one_key_alone_has_all_threads() -> None:
    async def check(threads: FairThreads) -> None:
        met = threading.Barrier(3)
        await asyncio.gather(*(threads.run(lambda: met.wait(120), "ann", "request") for _ in range(3)))

    in_threads(check, 3)


def test_a_thread_counts_until_its_work_ends_even_if_the_caller_has_left() -> None:
    async def check(threads: FairThreads) -> None:
        begun, free, done = threading.Event(), threading.Event(), list[str]()

        def work() -> None:
            begun.set()
            free.wait(60)
            done.append("long")

        leaving = asyncio.create_task(threads.run(work, "ann"))
        await asyncio.to_thread(begun.wait, 60)
        leaving.cancel()
        dropped = asyncio.create_task(threads.run(lambda: done.append("dropped"), "ann"))
        staying = asyncio.create_task(threads.run(lambda: done.append("stayed"), "ben"))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.gather(leaving, dropped, return_exceptions=True)
        assert not done
        free.set()
        await staying
        assert done == ["long", "stayed"]

    in_threads(check)


def test_work_after_the_end_is_refused_and_holds_no_place() -> None:
    async def check(threads: FairThreads) -> None:
        threads.close()
        for _ in range(2):
            with pytest.raises(RuntimeError):
                await threads.run(lambda: None, "ann")

    in_threads(check)


def leaving_s(num_waiting: int) -> float:
    """Time in which each of the last 200 callers leaves a long queue."""
    queue = FairQueue(1)
    waiting = [queue.ask("ann") for _ in range(num_waiting)]
    start_s = time.thread_time()
    for asked in reversed(waiting[-200:]):
        assert asked.cancel()
    return time.thread_time() - start_s


def test_to_leave_takes_no_longer_where_many_wait() -> None:
    assert min(leaving_s(12_000) for _ in range(3)) < 20 * max(leaving_s(400) for _ in range(3))
