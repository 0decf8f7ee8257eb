"""When weights leave and come back: times are passed in, so that no test waits."""

import pytest

from vllm_mlx.scheduler.residence import FIRST_PAUSE_S, LEAVING_S, LONGEST_PAUSE_S, Reason, Residence


def test_weights_stay_without_a_limit_and_leave_after_the_limit_without_a_request() -> None:
    always, never = Residence(), Residence(idle_unload_s=60)
    always.use(10)
    never.use(10)
    assert not always.is_idle(1e9)
    assert not never.is_idle(69) and never.is_idle(70)


def test_a_request_that_comes_while_state_is_written_keeps_the_weights() -> None:
    residence = Residence(idle_unload_s=60)
    residence.leave(100)
    assert not residence.is_wanted
    assert not residence.is_overdue(100 + LEAVING_S - 1) and residence.is_overdue(100 + LEAVING_S)
    residence.use(102)
    assert residence.is_wanted
    residence.stay(103)
    assert residence.state == "ready" and not residence.is_idle(162) and residence.is_idle(163)


def test_the_pause_after_a_failed_load_doubles_and_a_good_load_ends_that() -> None:
    residence, now = Residence(), 0.0
    pauses = []
    for _ in range(7):
        residence.load("request", now)
        residence.fail("no file", now)
        refusal = residence.refusal(now)
        assert refusal is not None and "no file" in refusal.message
        pauses.append(refusal.retry_after_s)
        now += pauses[-1]
        assert residence.state == "failed" and residence.refusal(now) is None, "the next request tries again"
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    residence.load("request", now)
    assert residence.loaded(now + 3) == 3 and residence.cause is None
    residence.fail("another", now)
    assert residence.refusal(now + FIRST_PAUSE_S) is None
    assert max(pauses) == LONGEST_PAUSE_S
    assert residence.loads["request"] == 8


def test_a_command_that_fails_makes_no_pause_of_requests_longer() -> None:
    residence, pauses = Residence(), []
    reasons: tuple[Reason, ...] = ("command", "command", "request", "command", "request")
    for number, reason in enumerate(reasons):
        residence.load(reason, 1000 * number)
        residence.fail("no file", 1000 * number)
        refusal = residence.refusal(1000 * number)
        pauses.append(refusal.retry_after_s if refusal else 0)
    assert pauses == [30, 30, 60, 60, 120]


@pytest.mark.parametrize("state", ["unloaded", "loading", "ready", "leaving"])
def test_only_a_failed_load_refuses(state: str) -> None:
    residence = Residence()
    {"unloaded": residence.unloaded, "loading": lambda now: residence.load("command", now), "ready": residence.use,
     "leaving": residence.leave}[state](5)  # fmt: skip
    assert residence.state == state and residence.refusal(5) is None
    assert residence.takes_memory == (state in ("ready", "leaving", "loading"))
