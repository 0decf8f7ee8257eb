"""The depth of drafts beside the best fixed depth, on published cost curves and on the machines of the device model."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_model import Device
from tests.support.rows import cases
from vllm_mlx.scheduler.depth import COSTLY, WRONG, DepthController

MOST = 7
STEPS = 4000
Pass = Callable[[int, int, int], float]  # rows, tokens, number of the step → seconds

# The cost of a pass by its tokens, 4-bit weights, as published or, from the last measured point on, as assumed.
CURVES: dict[str, dict[int, float]] = {
    "M5 Max": {1: 1, 3: 1.11, 5: 1.42, 8: 2.2, 12: 3.16, 16: 3.9, 32: 4.5},
    "M4 Pro": {1: 1, 2: 1.0, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 32: 4.5},
    "M2": {1: 1, 2: 1.725, 8: 5.5, 16: 6.3, 32: 6.5},
    "CPU": {1: 1, 32: 32},
}
TEXTS = {  # chance that a draft is right, cost of making one
    "file edit": (0.9, 0.0),
    "head on code": (0.8, 0.05),
    "head on prose": (0.55, 0.05),
    "n-grams on prose": (0.1, 0.0),
}


def on_curve(name: str) -> Pass:
    points = sorted(CURVES[name].items())

    def seconds(num_rows: int, num_tokens: int, step: int) -> float:
        above = next(at for at, (tokens, _) in enumerate(points) if tokens >= num_tokens)
        (a, x), (b, y) = points[max(above - 1, 0)], points[above]
        return y if a == b else x + (y - x) * (num_tokens - a) / (b - a)

    return seconds


def on_chip(chip: str, shape: str, start: int = 2000, growth: int = 0) -> Pass:
    device = Device(CHIPS[chip], SHAPES[shape])
    known: dict[tuple[int, int, int], float] = {}

    def seconds(num_rows: int, num_tokens: int, step: int) -> float:
        length = start + step // 100 * 100 * growth
        key = num_rows, num_tokens, length
        if key not in known:
            known[key] = device.decode_s([[[length]] * num_rows], num_tokens - num_rows)
        return known[key]

    return seconds


def accepted(rng: random.Random, chance: float, drafted: int) -> int:
    return next((i for i in range(drafted) if rng.random() > chance * 0.97**i), drafted)


def expected(chance: float, depth: int) -> float:
    """Tokens of a row in a step, on average."""
    total = kept = 1.0
    for i in range(depth):
        kept *= chance * 0.97**i
        total += kept
    return total


@dataclass
class Run:
    """Steps with a controller on a machine, whose measurements are off by up to 3 %."""

    machine: Pass
    chance: float
    draft_cost: float
    num_rows: int
    controller: DepthController
    padded: bool = False

    def steps(self, first: int, end: int) -> tuple[float, float]:
        """Tokens and seconds of the steps from `first` to `end`."""
        rng, tokens, seconds = random.Random(first + 1), 0, 0.0
        plain_s = self.machine(self.num_rows, self.num_rows, 0)
        for step in range(first, end):
            depths = self.controller.depths(dict.fromkeys(range(self.num_rows), MOST))
            widest = max(depths.values(), default=0)
            drafts = widest * self.num_rows if self.padded else sum(depths.values())
            took = self.machine(self.num_rows, self.num_rows + drafts, step) + self.draft_cost * plain_s * widest
            self.controller.observe(self.num_rows, self.num_rows + drafts, took * rng.uniform(0.97, 1.03))
            for seq_id, drafted in depths.items():
                right = accepted(rng, self.chance, drafted)
                self.controller.learn(seq_id, drafted, right)
                tokens += right
            tokens, seconds = tokens + self.num_rows, seconds + took
        return tokens, seconds

    def fixed_rate(self, depth: int) -> float:
        """Tokens a second at one depth in all rows and steps, on average."""
        plain_s, seconds = self.machine(self.num_rows, self.num_rows, 0), 0.0
        for step in range(0, STEPS, 100):
            seconds += self.machine(self.num_rows, self.num_rows * (1 + depth), step)
            seconds += self.draft_cost * plain_s * depth
        return self.num_rows * expected(self.chance, depth) * (STEPS // 100) / seconds


def check(machine: Pass, text: str, num_rows: int, padded: bool = False) -> str:
    """Compare all steps, the first ones and the looks included."""
    run = Run(machine, *TEXTS[text], num_rows, DepthController(MOST, padded=padded), padded)
    fixed = [run.fixed_rate(depth) for depth in range(MOST + 1)]
    tokens, seconds = run.steps(0, STEPS)
    rate, best = tokens / seconds, max(fixed)
    figures = f"{text}, {num_rows} rows: best {best / fixed[0]:.2f} at {fixed.index(best)}, ours {rate / fixed[0]:.2f}"
    assert rate >= 0.98 * fixed[0], figures
    assert rate >= 0.9 * best, figures
    return figures


@pytest.mark.parametrize(
    ("num_rows", "padded"),
    [(1, False), (4, True), *(pytest.param(*case, marks=pytest.mark.full) for case in [(1, True), (4, False)])],
)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("curve", cases(CURVES, ["M5 Max", "CPU"]))
def test_it_is_near_the_best_fixed_depth_on_published_curves(
    curve: str, text: str, num_rows: int, padded: bool
) -> None:
    print(curve, check(on_curve(curve), text, num_rows, padded))


@pytest.mark.parametrize("text", TEXTS)
def test_costs_that_grow_with_the_context_do_not_mislead(text: str) -> None:
    print(check(on_chip("M4 Pro", "Qwen3 8B", growth=10), text, 1))


# Parking


def test_it_parks_where_each_token_costs_the_same_and_says_why() -> None:
    run = Run(on_curve("CPU"), 0.9, 0.0, 1, DepthController(MOST))
    assert run.controller.parked is None
    run.steps(0, 200)
    assert run.controller.parked == COSTLY
    tokens, seconds = run.steps(200, 1200)
    assert tokens < 1050 and tokens / seconds > 0.98


def test_it_parks_where_drafts_are_wrong_and_says_why() -> None:
    run = Run(on_curve("M5 Max"), 0.02, 0.0, 1, DepthController(MOST))
    run.steps(0, 200)
    assert run.controller.parked == WRONG


def test_it_notices_that_the_text_has_changed() -> None:
    run = Run(on_curve("M5 Max"), 0.02, 0.0, 1, DepthController(MOST))
    run.steps(0, 3000)
    run.chance = 0.95
    run.steps(3000, 3600)
    assert run.controller.parked is None
    tokens, seconds = run.steps(3600, 3700)
    assert tokens / seconds > 2


def test_one_slow_pass_does_not_park() -> None:
    run = Run(on_curve("M5 Max"), 0.9, 0.0, 1, DepthController(MOST))
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
    run = Run(lambda num_rows, num_tokens, step: 1 + num_tokens / 20, 0.9, 0.0, 1, controller)
    tokens, seconds = run.steps(0, 300)
    assert tokens / seconds > 2
