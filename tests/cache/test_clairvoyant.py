"""The rule that knows the future, beside the best of all choices, on traces that are small enough to try them all."""

import itertools
import random

import pytest

from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_model import Device
from tests.support.keep_policies import Clairvoyant, Future
from tests.support.keep_simulation import Simulation, prefill_s
from tests.support.recorded_sessions import Request, Run
from vllm_mlx.cache.index import WORD_BYTES
from vllm_mlx.cache.node import NODE_BYTES

DEVICE = Device(CHIPS["M4 Max"], SHAPES["Qwen3 8B"])
UNIT, SHARED, LONGEST, SESSIONS = 4096, 2, 3, 3  # tokens; units of the shared beginning, of a session; sessions
Kept = tuple[int, ...]  # units of the shared beginning, then of each session


def requests_of(draw: random.Random) -> list[tuple[int, int]]:
    return [(draw.randrange(SESSIONS), draw.randint(1, LONGEST)) for _ in range(9)]


def as_requests(trace: list[tuple[int, int]]) -> list[Request]:
    ends = [(session, UNIT * (SHARED + units)) for session, units in trace]
    return [
        Request(
            at_s=100.0 * number,
            session=session,
            runs=(Run(0, 0, UNIT * SHARED), Run(1 + session, UNIT * SHARED, end)),
            num_prompt=end,
            points=(),
        )
        for number, (session, end) in enumerate(ends)
    ]


def least_s(trace: list[tuple[int, int]], budget: int) -> float:
    """The fewest seconds of prefill with so many units, over all choices of what to keep."""
    states = [
        (shared, *units)
        for shared in range(SHARED + 1)
        for units in itertools.product(range(LONGEST + 1), repeat=SESSIONS)
        if shared + sum(units) <= budget and (shared == SHARED or not any(units))
    ]
    best: dict[Kept, float] = {(0,) * (SESSIONS + 1): 0.0}
    for session, units in trace:
        end = UNIT * (SHARED + units) - 1
        after: dict[Kept, float] = {}
        for kept, spent_s in best.items():
            start = min(end, UNIT * (kept[0] + min(units, kept[1 + session])))
            held = [SHARED, *kept[1:]]
            held[1 + session] = max(units, held[1 + session])
            cost_s = spent_s + prefill_s(DEVICE, start, end)
            for state in states:
                if all(one <= other for one, other in zip(state, held, strict=True)):
                    after[state] = min(cost_s, after.get(state, cost_s))
        best = after
    return min(best.values())


@pytest.mark.parametrize("budget", [3, 4, 5, 6])
def test_it_is_near_the_best_choice(budget: int) -> None:
    ours_s = best_s = 0.0
    for seed in range(12):
        trace = requests_of(random.Random(seed))
        requests = as_requests(trace)
        rule = Clairvoyant(Future(requests))
        overhead = (SESSIONS + 2) * (NODE_BYTES + WORD_BYTES * UNIT * (SHARED + LONGEST))
        size = budget * UNIT * DEVICE.shape.token_bytes + overhead
        spent = Simulation(DEVICE, requests, memory_bytes=size, rules=(rule, rule)).run()
        ours_s, best_s = ours_s + spent.total_s, best_s + least_s(trace, budget)
    assert ours_s <= 1.1 * best_s
