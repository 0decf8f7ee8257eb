"""Which weights are in memory: each row of the table, and the times on which requests and failures depend."""

from itertools import product
from typing import Any, get_args

import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ModelUnavailable
from vllm_mlx.core.memory import MemoryBudget, RowFootprint
from vllm_mlx.scheduler.prefill_pacer import PrefillPacer
from vllm_mlx.scheduler.residence import (
    FIRST_PAUSE_S,
    LEAVING_S,
    LONGEST_PAUSE_S,
    TRANSITIONS,
    Event,
    Reason,
    Residency,
    Resident,
    State,
)
from vllm_mlx.scheduler.scheduler import Scheduler

WEIGHTS, ROOM, TOTAL = 1000, 100, 5000


def resident(name: str = "m", weights_bytes: int = WEIGHTS, **settings: Any) -> Resident:
    memory = MemoryBudget(total_bytes=TOTAL, weights_bytes=weights_bytes, transient_bytes=500)
    pacer = PrefillPacer(max_stall_s=0.2, max_chunk=512, tokens_per_s=1000, overhead_s=0.001)
    scheduler = Scheduler(
        EngineConfig(model=name), memory=memory, footprint=RowFootprint(bytes_per_token=1), pacer=pacer
    )
    return Resident(
        name=name, scheduler=scheduler, memory=memory, weights_bytes=weights_bytes, room_bytes=ROOM, **settings
    )


def residency(**settings: Any) -> tuple[Residency, Resident]:
    model = resident(**settings)
    return Residency([model]), model


# What each event does in each state; in all others it does nothing.
ROWS = {
    ("unloaded", "load"): ("loading", "begin"),
    ("failed", "load"): ("loading", "begin"),
    ("leaving", "load"): ("ready", None),
    ("ready", "unload"): ("leaving", None),
    ("loading", "unload"): ("unloaded", "give up"),
    ("leaving", "written"): ("unloaded", "free"),
    ("leaving", "evict"): ("unloaded", "free"),
    ("ready", "evict"): ("unloaded", "free"),
    ("loading", "read"): ("ready", None),
    ("loading", "fail"): ("failed", "give up"),
    ("loading", "damage"): ("loading", "begin"),
}
TAKEN = {"unloaded": 0, "failed": 0, "loading": WEIGHTS + ROOM, "ready": WEIGHTS, "leaving": WEIGHTS}


@pytest.mark.parametrize(("state", "event"), list(product(get_args(State), get_args(Event))))
def test_each_event_in_each_state(state: State, event: Event) -> None:
    owner, model = residency(state=state)
    after, action = ROWS.get((state, event), (state, None))
    assert owner.take(model, event, 5.0, cause="no file") == action
    assert model.state == after and model.scheduler.pool.planned_bytes == TOTAL - 500 - TAKEN[after]
    assert set(TRANSITIONS) == set(ROWS)
    assert model.begun_s == (5.0 if (state, event) in ROWS else 0.0)
    assert model.loads.total() == (action == "begin")
    assert (model.refusal(5.0) is not None) == (event == "fail" and state == "loading")


def test_weights_stay_without_a_limit_and_leave_after_the_limit_without_a_request() -> None:
    (_, always), (_, never) = residency(state="ready"), residency(state="ready", idle_unload_s=60)
    always.use(10)
    never.use(10)
    assert always.due(1e9, is_written=True) is None
    assert never.due(69, is_written=True) is None and never.due(70, is_written=True) == "unload"


def test_a_request_that_comes_while_state_is_written_keeps_the_weights() -> None:
    owner, model = residency(state="ready", idle_unload_s=60)
    owner.take(model, "unload", 100)
    assert model.due(100 + LEAVING_S - 1, is_written=False) is None
    assert model.due(101, is_written=True) == model.due(100 + LEAVING_S, is_written=False) == "written"
    model.use(102)
    assert model.due(103, is_written=True) == "load"
    assert owner.take(model, "load", 103) is None and model.loads.total() == 0
    assert model.due(162, is_written=True) is None and model.due(163, is_written=True) == "unload"


def test_the_pause_after_a_failed_load_doubles_and_a_good_load_ends_that() -> None:
    (owner, model), now = residency(), 0.0
    pauses = []
    for _ in range(7):
        owner.take(model, "load", now)
        owner.take(model, "fail", now, cause="no file")
        refusal = model.refusal(now)
        assert refusal is not None and "no file" in refusal.message
        pauses.append(refusal.retry_after_s)
        now += pauses[-1]
        assert model.state == "failed" and model.refusal(now) is None, "the next request tries again"
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    owner.take(model, "load", now)
    owner.take(model, "read", now + 3)
    assert model.load_s == 3 and model.cause is None
    owner.take(model, "evict", now + 4)
    owner.take(model, "load", now + 4)
    owner.take(model, "fail", now + 4, cause="another")
    assert model.refusal(now + 4 + FIRST_PAUSE_S) is None
    assert max(pauses) == LONGEST_PAUSE_S
    assert model.loads["request"] == 9


def test_a_command_that_fails_makes_no_pause_of_requests_longer() -> None:
    (owner, model), pauses = residency(), []
    reasons: tuple[Reason, ...] = ("command", "command", "request", "command", "request")
    for number, reason in enumerate(reasons):
        owner.take(model, "load", 1000 * number, reason=reason)
        owner.take(model, "fail", 1000 * number, cause="no file")
        refusal = model.refusal(1000 * number)
        pauses.append(refusal.retry_after_s if refusal else 0)
    assert pauses == [30, 30, 60, 60, 120]


@pytest.mark.parametrize(
    ("state", "others", "leaves"),
    [
        ("unloaded", {"idle": ("unloaded", False), "pinned": ("ready", True)}, None),
        ("loading", {"idle": ("ready", False), "pinned": ("ready", True)}, None),
        ("unloaded", {"idle": ("ready", False), "pinned": ("ready", True)}, "idle"),
        ("unloaded", {"pinned": ("ready", True), "pinned too": ("ready", True)}, ModelUnavailable),
        ("unloaded", {"pinned": ("ready", True), "exact": ("unloaded", False)}, None),
    ],
)
def test_a_load_by_command_has_room_or_an_idle_model_leaves(
    state: State, others: dict[str, tuple[State, bool]], leaves: Any
) -> None:
    """Three models of 2,200 bytes with 4,500 for two: the second one fits to the byte with the room for reading it."""
    model = resident("asked", 2200, state=state)
    beside = [resident(name, 2200, state=at, is_pinned=is_pinned) for name, (at, is_pinned) in others.items()]
    owner = Residency([model, *beside])
    if leaves is ModelUnavailable:
        with pytest.raises(ModelUnavailable, match="no room beside pinned, pinned too"):
            owner.model_to_leave_for(model, 0.0)
    else:
        found = owner.model_to_leave_for(model, 0.0)
        assert (found and found.name) == leaves
