"""Which model runs the next step: the one that was served least, for each tenant alike."""

from collections import Counter

from vllm_mlx.scheduler.lane_turns import LaneTurns


def shares(step_s: dict[int, float], tenants: dict[int, set[str]], num_steps: int = 6000) -> dict[int, float]:
    """The part of all time that each lane gets."""
    turns, served = LaneTurns(len(tenants)), Counter[int]()
    for _ in range(num_steps):
        lane = turns.next(tenants)
        turns.charge(lane, step_s[lane], tenants)
        served[lane] += step_s[lane]  # type: ignore[assignment]
    return {lane: seconds / sum(served.values()) for lane, seconds in served.items()}


def test_two_busy_models_of_one_tenant_get_half_of_the_time_each() -> None:
    found = shares({0: 0.05, 1: 0.004}, {0: {"a"}, 1: {"a"}})
    assert all(abs(share - 0.5) < 0.01 for share in found.values()), "also if a step of one takes longer"


def test_a_tenant_gains_little_by_using_several_models() -> None:
    found = shares({0: 0.01, 1: 0.01}, {0: {"a"}, 1: {"a", "b"}})
    assert abs(found[1] - 0.75) < 0.01, "of which the other tenant gets half"


def test_who_comes_is_served_at_once_and_gets_no_more_for_the_time_before() -> None:
    turns, one, both = LaneTurns(2), {0: {"a"}}, {0: {"a"}, 1: {"b"}}
    for _ in range(1000):
        turns.charge(turns.next(one), 0.1, one)
    order = []
    for _ in range(8):
        order.append(turns.next(both))
        turns.charge(order[-1], 0.11, both)
    assert order == [1, 1, 0, 1, 0, 1, 0, 1]


def test_who_comes_again_and_again_gets_no_more_than_who_stays() -> None:
    turns, served = LaneTurns(2), [0.0, 0.0]
    one, both = {0: {"a"}}, {0: {"a"}, 1: {"b"}}
    for _ in range(1000):
        lane = turns.next(one)
        turns.charge(lane, 0.01, one)
        served[lane] += 0.01
        is_served = False
        while not is_served:  # a short request
            lane = turns.next(both)
            turns.charge(lane, 0.1, both)
            served[lane] += 0.1
            is_served = lane == 1
    assert served[1] / sum(served) < 0.51


def test_a_lane_that_ran_long_before_waits_for_no_lane_that_has_just_come() -> None:
    turns, first, second, both = LaneTurns(2), {0: {"a"}}, {1: {"b"}}, {0: {"a"}, 1: {"b"}}
    order = []
    for busy in [*[first] * 1000, second, *[both] * 6]:
        order.append(turns.next(busy))
        turns.charge(order[-1], 0.1, busy)
    assert 2 <= order[-6:].count(0) <= 4, "nobody waited while the first one ran"
