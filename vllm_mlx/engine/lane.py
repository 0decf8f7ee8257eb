"""One checkpoint on the engine thread: what plans its steps, and its runner while its weights are in memory.

Scheduler, prefix cache and everything that prepares prompts stay when the weights leave, so that a request waits in the
queue as it would for a place. Weights come back in slices between steps, and nothing is measured again.
"""

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, get_args

import mlx.core as mx

from ..cache.media import MediaCache
from ..core.errors import ModelBusy, ModelLoadError, ModelUnavailable, first_line
from ..core.faults import Fault, device_fault
from ..core.fence import clear_locals
from ..core.memory import readable
from ..core.sequence import Sequence
from ..disk.tier import DiskTier
from ..runner.loading import Loading
from ..runner.model import Model
from ..runner.runner import Runner
from ..scheduler.residence import Reason, Residence
from ..scheduler.scheduler import Scheduler
from .monitoring.schema import EngineFacts, LaneReport
from .monitoring.status import draft_status, image_status

logger = logging.getLogger(__name__)
_PATIENT_LOADS = 4  # times that a load takes, before a busy model takes no more work for the sake of another
_LEAST_PATIENCE_S = 0.1
_CHUNK_SHARE = 0.75  # of a stall budget
_MUCH_MISSING = 1 << 20  # bytes that do not come back before the log says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """How to load the weights again, with what the first load measured."""

    begin: Callable[[], Loading[Model]]  # raises ModelLoadError, also for a checkpoint that has changed on disk
    run: Callable[[Model], Runner]
    weights_bytes: int
    room_bytes: int  # for what is in memory beside the weights while they are read
    load_s: float = 0.0  # what the first load took
    no_unload: str | None = None  # why the weights never leave; None if they may
    idle_unload_s: float = 0.0


class Lane:
    """Owns the runner of one checkpoint, and the bytes that its weights take. Belongs to the engine thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        reload: Reload,
        facts: EngineFacts,
        *,
        name: str = "",
        pin: bool = False,
    ):
        """The weights of a lane with a `pin` leave for no other model. `name` stands for the model in messages."""
        self.name = name or facts.info.model
        self.scheduler, self.media, self.facts = scheduler, runner.media, facts
        self.is_pinned = pin
        self._held: list[Sequence] = []  # what came since the weights are to leave for another model
        self.runner: Runner | None = runner
        self.residence = Residence(idle_unload_s=reload.idle_unload_s)
        self.residence.use(time.monotonic())
        self.reload = reload
        self._loading: Loading[Model] | None = None
        self._taken_bytes = reload.weights_bytes  # the pool was planned without them
        self._load_s = self._build_s = 0.0
        self._missing_bytes = 0
        self._beside_bytes = facts.memory.held_bytes  # what the pool was planned without, for others
        self._growth_bytes = 0  # what rows of others will take beside that
        self.is_stalled = False
        self.decoded_s = 0.0  # when its replies got their last tokens, by the engine's clock

    @property
    def has_work(self) -> bool:
        """Whether a step can do anything before the next message."""
        if self.runner is None or (self.residence.is_short and not self.scheduler.num_running):
            cache = self.scheduler.prefix_cache
            return cache is not None and cache.has_trims  # to remove cached state needs no model
        return self.scheduler.has_work and not self.is_stalled

    @property
    def is_busy(self) -> bool:
        """Whether sequences wait or run, or have left something to do."""
        return self.scheduler.has_work

    @property
    def held_bytes(self) -> int:
        """What this lane takes of the memory that all share, but for cached state."""
        memory = self.facts.memory
        return self.freed_bytes + memory.media_bytes + memory.grammars_bytes

    @property
    def freed_bytes(self) -> int:
        """Bytes that come back once its rows have ended and its weights have left."""
        return self.leaving_bytes + (0 if self.runner is None else self.scheduler.room.rows_bytes(extra=1))

    def share(self, beside_bytes: int, growth_bytes: int) -> None:
        """Leave in the pool what the other lanes, which take `beside_bytes`, do not take now.

        `growth_bytes`: what their rows will take too. No load takes that from them.
        """
        self.scheduler.pool.take(beside_bytes - self._beside_bytes)
        self._beside_bytes, self._growth_bytes = beside_bytes, growth_bytes

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. While the lane yields, it waits until the weights have left and come back."""
        self.is_stalled = False
        if self.residence.is_yielding:
            self._held.append(seq)
        else:
            self.scheduler.add(seq)
        self.residence.use(time.monotonic())

    def abort(self, seq_id: int) -> None:
        self._release([seq for seq in self._held if seq.seq_id == seq_id])
        self.scheduler.abort(seq_id)

    def _release(self, seqs: "Items[Sequence]") -> None:
        self._held = [seq for seq in self._held if seq not in seqs]
        for seq in seqs:
            self.scheduler.add(seq)

    @property
    def waiting(self) -> "Items[Sequence]":
        return [*self.scheduler.waiting, *self._held]

    @property
    def first(self) -> Sequence:
        """The sequence that waits longest. There must be one."""
        return next(iter(self.scheduler.waiting))

    @property
    def lacking_bytes(self) -> int:
        """What its first sequence lacks to run, with the weights if they are not in memory. Called after `share`."""
        if not self.wants_weights and (self.residence.state != "ready" or not self.scheduler.waiting):
            return 0
        row_bytes = self.scheduler.room.coming_bytes(self.first)
        if self.runner is None:
            needed_bytes = self.reload.weights_bytes + max(row_bytes, self.reload.room_bytes) + self._growth_bytes
        else:
            needed_bytes = self.scheduler.room.rows_bytes(extra=1) + row_bytes
        return needed_bytes - self.scheduler.pool.planned_bytes

    @property
    def is_outgrown(self) -> bool:
        """Whether its rows need more memory for the next step than other lanes leave. Called after `share`."""
        room, pool = self.scheduler.room, self.scheduler.pool
        return self.scheduler.num_running > 0 and room.rows_bytes(extra=1) > pool.planned_bytes

    @property
    def wants_weights(self) -> bool:
        """Whether sequences wait for weights that are not being loaded."""
        return bool(self.scheduler.waiting) and self.residence.may_load(time.monotonic())

    def fits_after(self, freed_bytes: int) -> bool:
        """Whether the weights are in memory, or have room there once others free so much. Called after `share`."""
        needed_bytes = self.reload.weights_bytes + self.reload.room_bytes + self._growth_bytes
        return self.residence.takes_memory or needed_bytes <= self.scheduler.pool.planned_bytes + freed_bytes

    @property
    def leaving_bytes(self) -> int:
        """What `leave` frees."""
        return self._taken_bytes + (0 if self.media is None else self.media.used_bytes)

    @property
    def may_leave(self) -> bool:
        """Whether the weights are in memory, and may leave for another model."""
        return self.runner is not None and not self.is_pinned and self.reload.no_unload is None

    @property
    def is_stuck(self) -> bool:
        """Whether the weights are in memory, but nothing runs, because all that waits has no room."""
        has_state = self.scheduler.num_running or (self.runner is not None and self.runner.num_rows)
        return self.residence.is_short and not has_state

    @property
    def patience_s(self) -> float:
        """How long its first sequence waits before another model that is busy takes no more work."""
        return max(_LEAST_PATIENCE_S, _PATIENT_LOADS * (self._load_s or self.reload.load_s))

    def stay(self) -> None:
        """Take work again, because no other model needs the memory any more."""
        self.residence.is_yielding = False
        self._release(self._held)

    def slack_s(self, now: float) -> float:
        """How long its replies can wait for the next step; infinite if none decodes."""
        prefill = self.scheduler.prefill
        return prefill.stall_s - prefill.decode_s - (now - self.decoded_s) if prefill.is_decoding else math.inf

    @property
    def wanted_s(self) -> float:
        """The slack that other lanes should have for its next step. A chunk is worth most of a stall budget."""
        prefill = self.scheduler.prefill
        return prefill.decode_s + (_CHUNK_SHARE * prefill.stall_s if prefill.is_prefilling else 0.0)

    def pace(self, slack_s: float | None) -> None:
        """Bound the chunks of the next step by the slack of other busy lanes. With None, nothing else is busy."""
        prefill = self.scheduler.prefill
        prefill.beside_s = math.inf if slack_s is None else max(0.0, min(prefill.stall_s, slack_s - prefill.decode_s))

    @property
    def is_settled(self) -> bool:
        """Whether the weights are in memory, and `move` has nothing to do."""
        return self.residence.state == "ready" and (self.is_busy or not self.residence.is_idle(time.monotonic()))

    @property
    def is_moving(self) -> bool:
        """Whether `move` has something to do at once."""
        return self.residence.state == "loading" or (self.wants_weights and not self.residence.is_short)

    @property
    def images(self) -> MediaCache[Any] | None:
        """The features of images that are cached; None if the model takes no images."""
        return self.media if self.facts.info.takes_images else None

    def report(self) -> LaneReport:
        cache = self.scheduler.prefix_cache
        return LaneReport(
            row={
                "pinned": self.is_pinned,
                "state": self.residence.state,
                "progress": None if self._loading is None else round(self._loading.progress, 4),
                "weights_bytes": self._taken_bytes,
                "missing_bytes": self._missing_bytes,
                "last_used_s": round(time.monotonic() - self.residence.used_s, 1),
                "running": self.scheduler.num_running,
                "waiting": len(self.waiting),
                "loads": {reason: self.residence.loads[reason] for reason in get_args(Reason)},
                "load_s": round(self._load_s, 3),
                "cause": self.residence.cause,
            },
            num_preemptions=self.scheduler.num_preemptions,
            num_restarts=self.scheduler.num_restarts,
            live_bytes=0 if self.runner is None else self.runner.live_bytes(),
            lacking_bytes=self.scheduler.pool.planned_bytes - self.scheduler.pool.num_bytes,
            num_shortened=self.scheduler.pool.num_shortened,
            num_skipped_captures=0 if cache is None else cache.num_skipped_captures,
            images=image_status(self.images),
            drafts=draft_status(self.facts.no_drafts, self.scheduler.speculation),
            media_bytes=0 if self.images is None else self.images.used_bytes,
            build_s=self._build_s,
        )

    def reset(self, error: Exception, *, is_damaged: bool) -> None:
        """Drop all rows, after a step that failed as a whole. A load fails, or begins again if arrays are damaged."""
        if self.runner is not None:
            if is_damaged:
                self.runner.drain()
            self.runner.reset()
        if self.residence.state == "loading" and is_damaged:
            self._give_up()
            self._begin(self.residence.reason)
        elif self.residence.state == "loading":
            self._fail(first_line(error))

    def load(self, reason: Reason) -> None:
        """Begin to load the weights without a request, also during the pause after a failed load."""
        match self.residence.state:
            case "leaving":
                self.residence.stay(time.monotonic())
            case "unloaded" | "failed":
                self._begin(reason)

    def unload(self) -> None:
        """Let the weights leave by command, once what ended requests have left to do is done.

        Called while no request is open. Raises ModelBusy if the weights never leave.
        """
        if self.reload.no_unload is not None:
            raise ModelBusy(self.reload.no_unload)
        if self.residence.state == "ready":
            self.residence.leave(time.monotonic())
        elif self.residence.state == "loading":
            self._give_up()

    def move(self, disk: DiskTier | None) -> tuple[ModelUnavailable | None, Exception | None]:
        """Bring the weights nearer to where they should be. Called between steps while the lane is not settled.

        Returns the error of the sequences that wait, if the model cannot be loaded, and a device fault that it met.
        """
        now, fault = time.monotonic(), None
        match self.residence.state:
            case "ready":
                self.residence.leave(now)
            case "leaving" if self.residence.is_wanted:
                self.residence.stay(now)
            case "leaving" if not self.is_busy:
                self._leave(disk, now)
            case "loading":
                fault = self._advance(now)
            case "unloaded" | "failed" if self.wants_weights and not self.residence.is_short:
                self._begin("request")
        refusal = self.residence.refusal(time.monotonic())
        return (refusal if self.scheduler.waiting else None), fault

    def raise_fault(self) -> None:
        """Raise the device fault that a change of cached state met, once nothing else is lost by it."""
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.raise_fault()

    # -- the weights leave

    def _leave(self, disk: DiskTier | None, now: float) -> None:
        """Free the weights once cached state is on disk, and then its copies in memory too."""
        if disk is None or disk.is_written or self.residence.is_overdue(now):
            self.leave()
            if disk is not None and self.scheduler.prefix_cache is not None:
                disk.free_memory(self.scheduler.prefix_cache.fingerprint)
                mx.clear_cache()

    def leave(self) -> None:
        """Free the weights at once, and compare what MLX counts with what is expected. The tree keeps what it has."""
        expected_bytes, before = self.leaving_bytes, mx.get_active_memory()
        self.free()
        freed_bytes = before - mx.get_active_memory()
        self._missing_bytes = max(0, expected_bytes - freed_bytes)
        logger.info("%s is unloaded: %s are free again", self.name, readable(freed_bytes))
        if self._missing_bytes > _MUCH_MISSING:
            logger.warning("%s of the weights of %s are still in memory", readable(self._missing_bytes), self.name)

    def free(self) -> None:
        """Free the runner, and let what was held back wait for it."""
        assert self.runner is not None and not self.runner.num_rows, "no row needs the weights"
        self.runner.reset()
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.forget_planned()
        self.runner = None
        if self.media is not None:
            self.media.clear()
        self._give_up()
        self.stay()

    # -- and come back

    def _begin(self, reason: Reason) -> None:
        self.residence.load(reason, time.monotonic())
        self._take(self.reload.weights_bytes + self.reload.room_bytes)
        self.scheduler.room.shrink_cache()
        try:
            self._loading = self.reload.begin()
        except ModelLoadError as error:
            self._fail(error.message)

    def _advance(self, now: float) -> Exception | None:
        """Read the next slice. Returns the device fault that it met."""
        assert self._loading is not None
        try:
            if (model := self._loading.advance()) is not None:
                self._arrive(model, self._loading)
            return None
        except ModelLoadError as error:
            fault = error.__cause__ if isinstance(error.__cause__, Exception) else None
            if device_fault(fault) is Fault.OUT_OF_MEMORY:
                self._fail(f"The device has no memory for the weights now ({first_line(fault or error)}).")
            else:
                self._fail(error.message)
            clear_locals(error)  # a frame may refer to the error, so that only a collection would free the weights
            return fault if device_fault(fault) is not None else None

    def _arrive(self, model: Model, loading: Loading[Model]) -> None:
        self.runner = self.reload.run(model)
        self._loading = None
        self._take(-self.reload.room_bytes)
        self._load_s, self._build_s = self.residence.loaded(time.monotonic()), loading.build_s
        mx.clear_cache()
        message = "%s is loaded again after %.1f s; to build it took %.0f ms, in which nothing else ran"
        logger.info(message, self.name, self._load_s, 1000 * self._build_s)

    def _fail(self, cause: str) -> None:
        self._give_up()
        self.residence.fail(cause, time.monotonic())
        logger.error("%s could not be loaded: %s", self.name, cause)

    def _give_up(self) -> None:
        """Free what was read, and give its bytes back."""
        self._loading = None
        mx.clear_cache()
        self._take(-self._taken_bytes)
        self.residence.unloaded(time.monotonic())

    def _take(self, num_bytes: int) -> None:
        self.scheduler.pool.take(num_bytes)
        self._taken_bytes += num_bytes
