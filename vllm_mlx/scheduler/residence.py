"""Decides which models have their weights in memory. It is pure: times are passed in, and it knows no mlx."""

import math
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from ..core.errors import ModelUnavailable
from ..core.memory import MemoryBudget
from ..core.sequence import Sequence
from .scheduler import Scheduler

State = Literal["ready", "leaving", "unloaded", "loading", "failed"]
Reason = Literal["start", "request", "command"]
Event = Literal["load", "unload", "evict", "written", "read", "fail", "damage"]
Action = Literal["begin", "free", "give up"]

# (state, event) -> (next state, action of the engine). Any other event changes nothing.
TRANSITIONS: dict[tuple[State, Event], tuple[State, Action | None]] = {
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

FIRST_PAUSE_S = 30.0  # after a failed load, before a request begins another one; each failure doubles it
LONGEST_PAUSE_S = 600.0
LEAVING_S = 10.0  # the longest wait for cached state that is being written to disk
_PATIENT_LOADS = 4  # times that a load takes, before a busy model takes no more work for the sake of another
_LEAST_PATIENCE_S = 0.1
_RETRY_S = 30.0  # after which a model that had no room may be loaded by command again


@dataclass(eq=False, kw_only=True)
class Resident:
    """A model of the server, whether its weights are in memory or not.

    `Residency` alone changes its state; the served model writes the figures of its loads. A scheduler and sizes that
    were assumed are replaced at the first load.
    """

    name: str
    scheduler: Scheduler
    memory: MemoryBudget
    room_bytes: int  # for what is in memory in addition to the weights while they are read
    expected_load_s: float = 0.0
    is_pinned: bool = False  # the weights leave for no other model
    no_unload: str | None = None  # why the weights never leave; None if they may
    idle_unload_s: float = 0.0  # time without a request after which the weights leave; with 0, they stay
    state: State = "unloaded"
    begun_s: float = 0.0  # when the present state began
    used_s: float = 0.0  # when the model was used last; any thread writes it
    loads: Counter[Reason] = field(default_factory=Counter)
    reason: Reason = "start"  # of the last load
    load_s: float = 0.0  # seconds of the last load after the start
    cause: str | None = None  # why the last load failed; None if it did not
    pause_s: float = 0.0  # after a failed load
    is_short: bool = False  # whether requests wait for memory that other models hold
    is_yielding: bool = False  # whether new sequences wait until the weights have left for another model and come back
    held: list[Sequence] = field(default_factory=list)  # the sequences that wait for that, or for the first load
    is_measured: bool = True  # whether the weights were loaded before; other sizes are assumed from the files' headers
    is_found: bool = False  # whether it is one of many that a request has named, of which few are used again
    growth_bytes: int = 0  # additional bytes for the rows of all models; a model without weights has no rows

    # -- sequences

    @property
    def holds_back(self) -> bool:
        """Return whether a new sequence belongs into `held`, rather than into the scheduler."""
        return self.is_yielding or not self.is_measured

    def abort(self, seq_id: int) -> None:
        self.release([seq for seq in self.held if seq.seq_id == seq_id])
        self.scheduler.abort(seq_id)

    def release(self, seqs: Items[Sequence]) -> None:
        """Give held sequences to the scheduler."""
        self.held = [seq for seq in self.held if seq not in seqs]
        for seq in seqs:
            self.scheduler.add(seq)

    def stay(self) -> None:
        """Take work again, because no other model needs the memory any more."""
        self.is_yielding = False
        if self.is_measured:
            self.release(self.held)

    def use(self, now: float) -> None:
        """Note that a request is here, or has just come."""
        self.used_s = max(self.used_s, now)

    @property
    def waiting(self) -> Items[Sequence]:
        return [*self.scheduler.waiting, *self.held]

    @property
    def queue(self) -> Collection[Sequence]:
        """Return the sequences that wait and are not held back."""
        return self.scheduler.waiting if self.is_measured else self.held

    @property
    def first(self) -> Sequence:
        """Return the sequence that waits longest. There must be one."""
        return next(iter(self.queue))

    @property
    def is_busy(self) -> bool:
        """Return whether sequences wait or run, or have left something to do."""
        return self.scheduler.has_work or bool(self.queue)

    # -- state

    @property
    def is_in_memory(self) -> bool:
        return self.state in ("ready", "leaving")

    @property
    def takes_memory(self) -> bool:
        """Return whether the weights are in memory, or are being loaded."""
        return self.is_in_memory or self.state == "loading"

    @property
    def may_leave(self) -> bool:
        """Return whether the weights are in memory, and may leave for another model."""
        return self.is_in_memory and not self.is_pinned and self.no_unload is None

    def refusal(self, now: float) -> ModelUnavailable | None:
        """Return the error of requests that wait during the pause after a failed load; None at other times."""
        left_s = self.begun_s + self.pause_s - now
        if self.state != "failed" or left_s <= 0:
            return None
        return ModelUnavailable(f"The model could not be loaded: {self.cause}", retry_after_s=left_s)

    def wants_weights(self, now: float) -> bool:
        """Return whether sequences wait for weights that are not being loaded."""
        return bool(self.queue) and not self.takes_memory and self.refusal(now) is None

    def is_moving(self, now: float) -> bool:
        """Return whether a load can continue immediately."""
        return self.state == "loading" or (self.wants_weights(now) and not self.is_short)

    def due(self, now: float, *, is_written: bool) -> Event | None:
        """Return the event that time, requests and cached state on disk cause, if any."""
        match self.state:
            case "ready" if 0 < self.idle_unload_s <= now - self.used_s and not self.is_busy:
                return "unload"
            case "leaving" if self.used_s > self.begun_s:
                return "load"
            case "leaving" if not self.is_busy and (is_written or now - self.begun_s >= LEAVING_S):
                return "written"
            case "unloaded" | "failed" if self.wants_weights(now) and not self.is_short:
                return "load"
        return None

    # -- bytes

    @property
    def taken_bytes(self) -> int:
        """Return bytes that the weights take now, with the room for reading them."""
        if self.state == "loading":
            return self.memory.weights_bytes + self.room_bytes
        return self.memory.weights_bytes if self.is_in_memory else 0

    @property
    def leaving_bytes(self) -> int:
        """Return bytes that are free once the weights have left."""
        return self.taken_bytes + self.scheduler.room.image_bytes

    @property
    def freed_bytes(self) -> int:
        """Return bytes that are free once its rows have ended and its weights have left."""
        return self.leaving_bytes + self.scheduler.room.rows_bytes(extra=1)

    @property
    def held_bytes(self) -> int:
        """Shared memory that this model uses, excluding its prefix cache."""
        kept_bytes = self.memory.media_bytes + self.memory.grammars_bytes
        return self.freed_bytes + (kept_bytes if self.takes_memory or not self.is_found else 0)

    def lacking_bytes(self, now: float) -> int:
        """Return the bytes that its first sequence lacks to run, with the weights if they are not in memory."""
        if not self.wants_weights(now) and (self.state != "ready" or not self.queue):
            return 0
        row_bytes = self.scheduler.room.coming_bytes(self.first)
        if self.is_in_memory:
            needed_bytes = self.scheduler.room.rows_bytes(extra=1) + row_bytes
        else:
            needed_bytes = self.memory.weights_bytes + max(row_bytes, self.room_bytes) + self.growth_bytes
        return needed_bytes - self.scheduler.pool.planned_bytes

    def fits_after(self, freed_bytes: int) -> bool:
        """Return whether the weights are in memory, or have room there once others free so much."""
        needed_bytes = self.memory.weights_bytes + self.room_bytes + self.growth_bytes
        return self.takes_memory or needed_bytes <= self.scheduler.pool.planned_bytes + freed_bytes

    @property
    def is_outgrown(self) -> bool:
        """Return whether its rows need more memory for the next step than other models leave."""
        room, pool = self.scheduler.room, self.scheduler.pool
        return self.scheduler.num_running > 0 and room.rows_bytes(extra=1) > pool.planned_bytes

    @property
    def is_stuck(self) -> bool:
        """Return whether the weights are in memory, but nothing runs, because all that waits has no room."""
        return self.is_short and not self.scheduler.holds_rows

    @property
    def patience_s(self) -> float:
        """Seconds for which its first sequence waits before another model that is busy takes no more work."""
        return max(_LEAST_PATIENCE_S, _PATIENT_LOADS * (self.load_s or self.expected_load_s))


M = TypeVar("M", bound=Resident)


class Residency(Generic[M]):
    """Owns the state of each model's weights, and the memory that each model may use. Belongs to the engine thread."""

    def __init__(self, models: list[M]):
        self.models = models
        self._short_since_s: dict[int, float] = {}  # since when sequences that waited longest have had no room
        self.measure(0.0)

    @property
    def is_calm(self) -> bool:
        """Return whether no model comes or leaves, or waits for memory."""
        return not any(
            each.state in ("loading", "leaving") or each.is_short or (each.queue and not each.is_in_memory)
            for each in self.models
        )

    def take(
        self, model: M, event: Event, now: float, *, reason: Reason = "request", cause: str | None = None
    ) -> Action | None:
        """Take an event, and return the action for the engine. `reason` is that of a load, `cause` of a failure."""
        if (row := TRANSITIONS.get((model.state, event))) is None:
            return None
        before, begun_s = model.state, model.begun_s
        model.state, action = row
        model.begun_s = now
        match action, model.state:
            case "begin", _:
                model.reason = model.reason if event == "damage" else reason
                model.loads[model.reason] += 1
            case _, "ready":
                model.use(now)
                if before == "loading":
                    model.stay()
                    model.cause, model.pause_s, model.load_s = None, 0.0, now - begun_s
            case _, "failed":
                model.cause = cause
                longer_s = model.pause_s if model.reason == "command" else min(LONGEST_PAUSE_S, 2 * model.pause_s)
                model.pause_s = longer_s or FIRST_PAUSE_S
            case "free", _:
                model.stay()
        self.measure(now)
        return action

    def measure(self, now: float) -> None:
        """Compute how much memory each model may use, and which models must wait.

        One model loads at a time: that of the sequence that has waited longest, also if a smaller model had room
        before, so that no model is overtaken again and again. A model that waits for running rows delays no other.
        """
        models = self.models
        held = [model.held_bytes for model in models]
        steps = [model.memory.transient_bytes for model in models if model.takes_memory]
        growth_bytes = sum(model.scheduler.room.growth_bytes for model in models)
        for model, own in zip(models, held, strict=True):
            memory, room, others = model.memory, model.scheduler.room, self.others(model)
            fixed_bytes = model.taken_bytes + memory.media_bytes + memory.grammars_bytes
            step_bytes = max([memory.transient_bytes, *steps])
            model.scheduler.pool.plan(memory.total_bytes - step_bytes - fixed_bytes - (sum(held) - own))
            model.growth_bytes = growth_bytes
            room.is_shared = any(other.may_leave or other.is_busy for other in others)
            room.first_beside = min((other.scheduler.room.first_id for other in others), default=math.inf)
            model.is_short = room.is_shared and model.lacking_bytes(now) > 0
        wanting = [
            each for each in models if (each.is_short and not each.scheduler.num_running) or each.wants_weights(now)
        ]
        able = [model for model in wanting if self._can_have_room(model, now)]
        first = min(able, key=lambda model: model.first.seq_id, default=None)
        is_loading = any(model.state == "loading" for model in models)
        for model in wanting:
            model.is_short |= not model.is_in_memory and (is_loading or model is not first)

    def _can_have_room(self, model: M, now: float) -> bool:
        """Return whether all that may leave would make room for its first sequence, or no other model runs then."""
        others = self.others(model)
        if not any(other.is_pinned and other.is_busy for other in others):
            return True
        leaving = [other for other in others if not other.is_pinned]
        growth_bytes = 0 if model.is_in_memory else sum(other.scheduler.room.growth_bytes for other in leaving)
        return model.lacking_bytes(now) <= growth_bytes + sum(other.freed_bytes for other in leaving)

    def model_to_leave(self, now: float) -> M | None:
        """Return the model whose weights leave now for another one. Called after `measure`.

        They leave for the model whose first sequence has waited longest and has no room. Models without work leave if
        that is enough, if nothing that runs can give memory back, or if running rows need more. Once the sequence has
        waited for some loads, they leave in any case, and then a busy one: it serves the sequences that have come by
        then, and no later ones.
        """
        waiting = [model for model in self.models if model.is_short]
        short = [model for model in waiting if self._can_have_room(model, now)]
        since_s, waiting_ids = self._short_since_s, {model.first.seq_id for model in waiting}
        self._short_since_s = {seq_id: since_s[seq_id] for seq_id in waiting_ids & since_s.keys()}
        idle = [model for model in self.models if model.may_leave and not model.is_busy]
        is_outgrown = any(model.is_outgrown for model in self.models)
        if not short:
            for model in self.models:
                model.stay()
            return _longest_unused(idle) if is_outgrown else None
        if any(model.is_moving(now) for model in self.models):
            return None
        first = min(short, key=lambda model: (model.scheduler.num_running > 0, model.first.seq_id))
        leaving = [model for model in self.others(first) if model.may_leave]
        waits_long = now - self._short_since_s.setdefault(first.first.seq_id, now) > first.patience_s
        lacking_bytes, are_running = first.lacking_bytes(now), any(m.scheduler.num_running for m in self.others(first))
        is_worth_it = waits_long or is_outgrown or not are_running
        for free in (idle, [model for model in leaving if model in idle or model.is_stuck]):
            if free and (is_worth_it or sum(model.leaving_bytes for model in free) >= lacking_bytes):
                enough = [model for model in free if model.memory.weights_bytes >= lacking_bytes]
                return min(enough, key=lambda model: model.memory.weights_bytes, default=_longest_unused(free))
        if leaving and not first.scheduler.num_running and waits_long:
            min(leaving, key=lambda model: model.begun_s).is_yielding = True
        return None

    def model_to_leave_for(self, model: M, now: float) -> M | None:
        """Return the idle model that leaves for a load by command; None if none has to. Raises ModelUnavailable."""
        self.measure(now)
        others = self.others(model)
        idle = [other for other in others if other.may_leave and not other.is_busy]
        beside = ", ".join(other.name for other in others if other not in idle and other.takes_memory)
        if beside and not model.fits_after(sum(other.leaving_bytes for other in idle)):
            raise ModelUnavailable(
                f"The weights do not fit together with {beside}. Wait until their requests end, or unload one.",
                retry_after_s=_RETRY_S,
            )
        return None if model.fits_after(0) else _longest_unused(idle)

    def others(self, model: M) -> list[M]:
        return [other for other in self.models if other is not model]


def _longest_unused(models: Items[M]) -> M | None:
    return min(models, key=lambda model: model.used_s, default=None)
