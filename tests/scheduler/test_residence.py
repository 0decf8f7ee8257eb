"""Which weights are in memory: each row of the table, and the times on which requests and failures depend."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import pytest

from vllm_mlx.cache.media import MediaCache
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ModelUnavailable
from vllm_mlx.core.memory import MemoryBudget, RowFootprint
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.scheduler.image_planner import MLLMScheduler
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


@dataclass
class Features:
    nbytes: int


def resident(
    name: str = "m", weights_bytes: int = WEIGHTS, images: MLLMScheduler | None = None, **settings: Any
) -> Resident:
    memory = MemoryBudget(total_bytes=TOTAL, weights_bytes=weights_bytes, transient_bytes=500)
    pacer = PrefillPacer(max_stall_s=0.2, max_chunk=512, tokens_per_s=1000, overhead_s=0.001)
    scheduler = Scheduler(
        EngineConfig(model=name), memory=memory, footprint=RowFootprint(bytes_per_token=1), pacer=pacer, images=images
    )
    return Resident(name=name, scheduler=scheduler, memory=memory, room_bytes=ROOM, **settings)


def send(model: Resident, seq_id: int, *, runs: bool = False, num_tokens: int = 10) -> None:
    """Send a sequence, and with `runs` let it begin."""
    prompt = PromptInputs(token_ids=(1,) * num_tokens)
    model.scheduler.add(Sequence(seq_id=seq_id, prompt=prompt, sampling=TokenSampling(), max_tokens=600))
    if runs:
        model.scheduler.schedule()


def leaving(owner: Residency, *times_s: float) -> list[str | None]:
    """Return the names of the models that leave at these times; by default, before and after a long wait."""
    found = []
    for now in times_s or (1.0, 100.0):
        owner.measure(now)
        found.append(owner.model_to_leave(now))
    return [model and model.name for model in found]


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
        with pytest.raises(ModelUnavailable, match="do not fit together with pinned, pinned too"):
            owner.model_to_leave_for(model, 0.0)
    else:
        found = owner.model_to_leave_for(model, 0.0)
        assert (found and found.name) == leaves


@pytest.mark.parametrize("more_bytes", [0, 1])
def test_a_load_by_command_leaves_the_memory_for_which_rows_were_admitted(more_bytes: int) -> None:
    busy = resident("busy", state="ready")
    send(busy, 0, runs=True)
    left_bytes = TOTAL - 500 - busy.held_bytes - busy.scheduler.room.growth_bytes
    model = resident("asked", left_bytes - ROOM + more_bytes)
    owner = Residency([model, busy])
    if more_bytes:
        with pytest.raises(ModelUnavailable, match="do not fit together with busy"):
            owner.model_to_leave_for(model, 0.0)
    else:
        assert owner.model_to_leave_for(model, 0.0) is None


@pytest.mark.parametrize("more_bytes", [0, 1])
@pytest.mark.parametrize("state", ["unloaded", "ready"])
def test_beside_a_busy_pinned_model_others_leave_only_if_that_makes_room(state: State, more_bytes: int) -> None:
    """The rows of another model leave with it, and what they would have grown by is free."""
    pinned, other = resident("pinned", state="ready", is_pinned=True), resident("other", state="ready")
    for number, model in enumerate((pinned, other)):
        send(model, number, runs=True)
    left_bytes = TOTAL - 500 - pinned.held_bytes
    row_bytes = other.scheduler.room.rows_bytes() + other.scheduler.room.growth_bytes
    if state == "unloaded":
        left_bytes -= pinned.scheduler.room.growth_bytes
    asked = resident("asked", left_bytes - row_bytes + more_bytes, state=state)
    send(asked, 2)
    owner = Residency([pinned, other, asked])
    assert leaving(owner) == [None, None]
    assert other.is_yielding == (not more_bytes)


@pytest.mark.parametrize("other", ["pinned", "idle", "busy"])
def test_a_model_that_never_has_room_is_tried_once_nothing_else_runs(other: str) -> None:
    beside = resident(other, state="ready", is_pinned=other == "pinned")
    asked = resident("asked", TOTAL - 550)
    if other == "busy":
        send(beside, 0, runs=True)
    send(asked, 1)
    owner = Residency([beside, asked])
    names = leaving(owner)
    found = asked.due(100.0, is_written=True), names, beside.is_yielding
    expected = {"pinned": ("load", [None, None], False), "idle": (None, ["idle", "idle"], False)}
    assert found == expected.get(other, (None, [None, None], True))


def test_a_model_whose_sequences_all_lack_room_leaves_for_an_older_one() -> None:
    asked, stuck = resident("asked", 3000), resident("stuck", 3000, state="ready")
    send(asked, 0)
    send(stuck, 1, num_tokens=2000)
    assert leaving(Residency([asked, stuck])) == ["stuck", "stuck"]


def test_the_smallest_idle_model_leaves_that_makes_room() -> None:
    sizes = {"small": 400, "right": 1000, "unused": 1200}
    idle = [resident(name, size, state="ready", used_s=float(size < 1200)) for name, size in sizes.items()]
    asked = resident("asked", 2000)
    send(asked, 0)
    assert leaving(Residency([asked, *idle])) == ["right", "right"]


@pytest.mark.parametrize("is_asked", [True, False])
def test_an_idle_model_leaves_immediately_for_rows_that_have_outgrown_their_memory(is_asked: bool) -> None:
    growing, idle, asked = resident("growing"), resident("idle", 1500), resident("asked", 2500)
    growing.state = idle.state = "ready"
    send(growing, 0, runs=True, num_tokens=2000)
    if is_asked:  # the idle model alone would not make room for it
        send(asked, 1)
    assert leaving(Residency([growing, idle, asked])) == ["idle", "idle"]


def test_one_busy_model_yields_at_a_time_that_which_is_loaded_longest() -> None:
    busy = [resident(str(begun_s), state="ready", begun_s=float(begun_s)) for begun_s in (3, 2)]
    for number, model in enumerate(busy):
        send(model, number, runs=True)
    asked = resident("asked", 4000)
    send(asked, 2)
    owner = Residency([*busy, asked])
    assert leaving(owner, 1.0, 100.0, 200.0) == [None] * 3
    assert [model.is_yielding for model in busy] == [False, True]
    asked.abort(2)
    assert leaving(owner, 300.0) == [None] and not any(model.is_yielding for model in busy)


def test_a_model_that_yields_has_a_busy_one_yield_for_its_own_older_sequence() -> None:
    """Its own sequence is older than the one for which it yields."""
    stuck, busy, asked = (
        resident("stuck", state="ready"),
        resident("busy", state="ready", begun_s=1),
        resident("asked", 4000),
    )
    send(stuck, 0, runs=True)
    send(stuck, 1, num_tokens=2000)
    send(asked, 2)
    send(busy, 3, runs=True)
    owner = Residency([stuck, busy, asked])
    assert leaving(owner) == [None, None] and stuck.is_yielding and not busy.is_yielding
    stuck.abort(0)
    assert leaving(owner, 200.0, 300.0) == [None, None] and busy.is_yielding


def test_the_features_of_images_leave_with_the_weights() -> None:
    """One idle model makes room to the byte, by a request and by command."""
    features = MediaCache[Features](0)
    images = MLLMScheduler(features, max_bytes=WEIGHTS, bytes_per_token=0, bidirectional=False)
    idle, busy, asked = resident("idle", images=images), resident("busy", is_pinned=True), resident("asked")
    features.store(("", b"a"), Features(100))
    idle.state = busy.state = "ready"
    send(busy, 0, runs=True)
    send(asked, 1)
    owner = Residency([idle, busy, asked])
    asked.memory = replace(asked.memory, weights_bytes=2 * WEIGHTS + 100 - asked.lacking_bytes(0.0))
    assert leaving(owner, 1.0) == ["idle"]
    room_bytes = asked.scheduler.pool.planned_bytes + WEIGHTS + 100
    asked.memory = replace(asked.memory, weights_bytes=room_bytes - ROOM - asked.growth_bytes)
    assert owner.model_to_leave_for(asked, 1.0) is idle


@pytest.mark.parametrize("state", ["unloaded", "ready"])
def test_the_step_of_a_model_takes_memory_only_with_its_weights(state: State) -> None:
    small, large = resident("small", state="ready"), resident("large", state=state)
    large.memory = replace(large.memory, transient_bytes=900)
    Residency([small, large])
    taken_bytes = 2 * WEIGHTS + 900 if state == "ready" else WEIGHTS + 500
    assert small.scheduler.pool.planned_bytes == TOTAL - taken_bytes - large.scheduler.room.rows_bytes(extra=1)
    assert large.scheduler.pool.planned_bytes == TOTAL - 900 - (taken_bytes - 900 if state == "ready" else WEIGHTS)


def test_no_busy_model_yields_for_one_whose_own_rows_run() -> None:
    asked, busy = resident("asked", state="ready"), resident("busy", state="ready")
    send(asked, 0, runs=True)
    send(busy, 1, runs=True)
    send(asked, 2, num_tokens=2000)
    assert leaving(Residency([asked, busy])) == [None, None]
    assert asked.is_short and not busy.is_yielding


def test_a_model_that_waits_for_a_busy_pinned_one_delays_no_other() -> None:
    pinned, large, small = resident("pinned", state="ready", is_pinned=True), resident("large", 4000), resident("small")
    for number, model in enumerate((pinned, large, small)):
        send(model, number, runs=model is pinned)
    owner = Residency([pinned, large, small])
    assert leaving(owner, 1.0) == [None]
    assert [model.due(1.0, is_written=True) for model in (large, small)] == [None, "load"]


def test_a_found_model_takes_room_for_images_and_grammars_only_with_its_weights() -> None:
    held = []
    for settings in ({}, {"is_found": True}, {"is_found": True, "state": "ready"}):
        model = resident(**settings)
        model.memory = replace(model.memory, grammars_bytes=100)
        held.append(model.held_bytes - model.freed_bytes)
    assert held == [100, 0, 100]
