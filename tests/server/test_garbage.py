"""Full garbage collections: at quiet moments, and after a while at any."""

import gc
from collections.abc import Iterator

import pytest

from vllm_mlx.server.run import DUE, MAX_OBJECTS, MAX_WAIT_S, GarbageCollector


class Interpreter:
    """How many objects are alive, and the time."""

    num_objects = 1_000
    now_s = 0.0


@pytest.fixture
def interpreter() -> Interpreter:
    return Interpreter()


@pytest.fixture
def garbage(interpreter: Interpreter) -> Iterator[GarbageCollector]:
    collector = GarbageCollector(num_objects=lambda: interpreter.num_objects, clock=lambda: interpreter.now_s)
    thresholds = gc.get_threshold()
    with collector:
        yield collector
    assert gc.get_threshold() == thresholds


def num_full() -> int:
    return int(gc.get_stats()[2]["collections"])


def make_due() -> None:
    for _ in range(DUE + 1):
        gc.collect(1)


def test_python_itself_runs_no_full_collection_while_objects_multiply(garbage: GarbageCollector) -> None:
    before = num_full()
    kept = [[] for _ in range(1_000_000)]
    assert num_full() == before and len(kept) == 1_000_000


def test_a_full_collection_waits_until_it_is_due(garbage: GarbageCollector) -> None:
    before = num_full()
    garbage.tick()
    assert num_full() == before
    make_due()
    garbage.tick()
    assert num_full() == before + 1
    garbage.tick()
    assert num_full() == before + 1


def test_a_full_collection_waits_for_a_quiet_moment_but_not_for_ever(
    garbage: GarbageCollector, interpreter: Interpreter
) -> None:
    before = num_full()
    make_due()
    interpreter.num_objects += MAX_OBJECTS + 1
    garbage.tick()
    assert num_full() == before
    interpreter.now_s = MAX_WAIT_S
    garbage.tick()
    assert num_full() == before + 1


def test_garbage_in_cycles_goes(garbage: GarbageCollector) -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    found = id(cycle)
    make_due()  # it is old by now
    del cycle
    garbage.tick()
    assert all(id(each) != found for each in gc.get_objects())
