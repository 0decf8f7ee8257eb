"""The depth of drafts: when it parks, and how it treats rows. `test_draft_bounds` sets it beside fixed depths."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from vllm_mlx.scheduler.depth import COSTLY, WRONG, DepthController

MOST = 7
Pass = Callable[[int, int, int], float]  # rows, tokens, number of the step → seconds


def stairs(num_rows: int, num_tokens: int, step: int) -> float:
    """A machine on which some drafts cost little, as published of an M5 Max with weights in 4 bits."""
    return min(max(0.86 + 0.14 * num_tokens, 0.28 * num_tokens), 4.5) if num_tokens > 1 else 1.0


def plain(num_rows: int, num_tokens: int, step: int) -> float:
    """A machine on which each token costs the same."""
    return float(num_tokens)


def accepted(rng: random.Random, chance: float, drafted: int) -> int:
    return next((i for i in range(drafted) if rng.random() > chance * 0.97**i), drafted)


@dataclass
class Run:
    """Steps with a controller on a machine, whose measurements are off by up to 3 %."""

    machine: Pass
    chance: float
    num_rows: int
    controller: DepthController

    def steps(self, first: int, end: int) -> tuple[float, float]:
        """Tokens and seconds of the steps from `first` to `end`."""
        rng, tokens, seconds = random.Random(first + 1), 0, 0.0
        for step in range(first, end):
            depths = self.controller.depths(dict.fromkeys(range(self.num_rows), MOST))
            drafts = sum(depths.values())
            took = self.machine(self.num_rows, self.num_rows + drafts, step)
            self.controller.observe(self.num_rows, self.num_rows + drafts, took * rng.uniform(0.97, 1.03))
            for seq_id, drafted in depths.items():
                right = accepted(rng, self.chance, drafted)
                self.controller.learn(seq_id, drafted, right)
                tokens += right
            tokens, seconds = tokens + self.num_rows, seconds + took
        return tokens, seconds


# Parking


def test_it_parks_where_each_token_costs_the_same_and_says_why() -> None:
    run = Run(plain, 0.9, 1, DepthController(MOST))
    assert run.controller.parked is None
    run.steps(0, 200)
    assert run.controller.parked == COSTLY
    tokens, seconds = run.steps(200, 1200)
    assert tokens < 1050 and tokens / seconds > 0.98


def test_it_parks_where_drafts_are_wrong_and_says_why() -> None:
    run = Run(stairs, 0.02, 1, DepthController(MOST))
    run.steps(0, 200)
    assert run.controller.parked == WRONG


def test_it_notices_that_the_text_has_changed() -> None:
    run = Run(stairs, 0.02, 1, DepthController(MOST))
    run.steps(0, 3000)
    run.chance = 0.95
    run.steps(3000, 3600)
    assert run.controller.parked is None
    tokens, seconds = run.steps(3600, 3700)
    assert tokens / seconds > 2


def test_one_slow_pass_does_not_park() -> None:
    run = Run(stairs, 0.9, 1, DepthController(MOST))
    run.steps(0, 50)
    run.controller.observe(1, 8, 1000.0)
    run.steps(50, 60)
    assert run.controller.parked is None


# Rows


def decide(controller: DepthController, available: Mapping[int, int], num_steps: int = 3) -> dict[int, int]:
    """The depths after the passes that come first without drafts."""
    depths: dict[int, int] = {}
    for _ in range(num_steps + 1):
        depths = controller.depths(available)
    return depths


def test_a_clock_that_stands_still_leaves_it_hopeful() -> None:
    controller = DepthController(MOST)
    for step in range(50):
        depths = controller.depths({4: 9, 5: 0})
        controller.observe(2, 2 + sum(depths.values()), 0.0)
        assert step < 3 or depths == {4: MOST}
        controller.learn(4, MOST, MOST)


def test_a_fixed_depth_takes_all_drafts() -> None:
    controller = DepthController(3, fixed=True)
    assert controller.depths({1: 9, 2: 2, 3: 0}) == {1: 3, 2: 2}
    for _ in range(50):
        controller.learn(1, 3, 0)
        controller.observe(1, 4, 50.0)
        controller.observe(1, 1, 1.0)
    assert controller.depths({1: 9}) == {1: 3}
    assert controller.parked is None


@pytest.mark.parametrize("padded", [False, True])
def test_rows_without_luck_take_no_drafts_beside_others_unless_they_are_padded(padded: bool) -> None:
    controller = DepthController(MOST, padded=padded)
    for _ in range(300):
        depths = controller.depths({0: MOST, 1: MOST, 2: 0})
        drafts = 3 * max(depths.values(), default=0) if padded else sum(depths.values())
        controller.observe(3, 3 + drafts, 1 + drafts / 100)
        for seq_id, depth in depths.items():
            controller.learn(seq_id, depth, depth if seq_id == 0 else 0)
    depths = decide(controller, {0: MOST, 1: MOST, 2: 0}, 0)
    assert depths[0] > 2
    assert (1 in depths) is padded
    assert 2 not in depths


def test_a_new_row_begins_hopeful_and_an_ended_one_is_forgotten() -> None:
    controller = DepthController(MOST)
    assert decide(controller, {0: 4}) == {0: 4}
    for _ in range(60):
        controller.learn(0, 4, 0)
    assert controller.depths({0: 4}) == {}
    assert controller.depths({0: 4, 1: 4}) == {}, "a plain pass of two rows comes first"
    assert decide(controller, {0: 4, 1: 4}) == {1: 4}
    controller.forget(0)
    controller.learn(0, 4, 0)
    assert controller.depths({0: 4, 1: 4}) == {0: 4, 1: 4}


def test_nothing_is_drafted_where_no_row_has_drafts() -> None:
    controller = DepthController(MOST)
    assert all(controller.depths({0: 0, 1: 0}) == {} for _ in range(100))
    assert all(controller.depths({}) == {} for _ in range(3))
    assert controller.parked is None


def test_many_shapes_leave_decisions_right() -> None:
    controller, rng = DepthController(MOST), random.Random(3)
    for num_rows in [*range(1, 200), 1, 1, 1]:
        for _ in range(8):
            tokens = num_rows + rng.randrange(MOST * num_rows + 1)
            for measured in (num_rows, tokens):
                controller.observe(num_rows, measured, 1 + measured / 20)
    run = Run(lambda num_rows, num_tokens, step: 1 + num_tokens / 20, 0.9, 1, controller)
    tokens, seconds = run.steps(0, 300)
    assert tokens / seconds > 2
