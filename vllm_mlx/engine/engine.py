"""The engine: schedule → decode → prefill → update, one step at a time. It belongs to the engine thread."""

import ctypes
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import TypeVar

import mlx.core as mx

from ..cache.stats import DiskReport, Entry
from ..cache.tree import MemoryAwarePrefixCache
from ..core.errors import (
    ConfigError,
    EngineDead,
    GenerationError,
    ModelBusy,
    ModelLoadError,
    first_line,
)
from ..core.sequence import Sequence
from ..core.step import NO_WORK, SequenceUpdate, StepOutput
from ..disk.tier import DiskTier
from ..ranks.figures import RankRow
from ..runner.device import DeviceWatch
from ..runner.runner import Runner
from ..scheduler.lane_turns import LaneTurns
from ..scheduler.prefix_planner import PrefixPlanner
from ..scheduler.residence import Event, Reason, Residency, Resident
from ..scheduler.scheduler import Scheduler
from ..util.faults import MAX_FAULTS, DeviceFault, Fault, device_fault
from ..util.fence import Fence, clear_locals
from .lane import Lane, ServedModel
from .macos import return_freed_memory
from .monitoring.schema import EngineFacts, EngineReport
from .monitoring.status import draft_status, image_status

logger = logging.getLogger(__name__)
T = TypeVar("T")
_IDLE_S = 1.0  # without work, the thread looks this often whether other programs lack memory
_SOON_S = 0.2  # and this often while state is to be written soon
_RETURN_EVERY_S = 5.0  # without work, what Python and libraries freed goes back to the system this often
Deliver = Callable[[list[SequenceUpdate]], None]


class LLMEngine:
    """Runs the steps of all models, one model's at a time. Members that name no model refer to the default model."""

    def __init__(self, models: Items[ServedModel], watch: DeviceWatch, clock: Callable[[], float] = time.monotonic):
        """`models` by their positions. They share one tree of cached state, if they cache any."""
        self._clock = clock
        self.models = tuple(models)
        self.residency = Residency([model.residence for model in models])
        self._turns = LaneTurns(len(models))
        self._last = self.default  # it ran the last step
        self._num_urgent = 0  # steps in a row for lanes whose replies could wait no longer
        self.disk: DiskTier | None = None
        self._disk_settings: DiskReport | None = None  # reported without a tier; None if a setting turns it off
        self._has_disk_work = False  # whether it has more to do at once
        self.watch = watch
        self._aborts: list[int] = []  # handled in the next step, inside its fence, because an abort captures state
        self._longest_chunk = 0  # tokens that the running work computes for one row
        self._num_faults = 0  # device faults since the last good step
        self.num_steps = 0
        self._returned_s = clock()  # when freed memory was returned to the system
        self.rank_reports: Callable[[], tuple[RankRow, ...]] = tuple  # of a model that several Macs run
        self._end: EngineDead | None = None  # why no step can follow
        for model in models:
            model.residence.use(self._returned_s)

    @property
    def has_work(self) -> bool:
        """Return whether a step can do anything before the next message."""
        return bool(self._aborts) or any(model.has_work for model in self.models)

    @property
    def is_busy(self) -> bool:
        """Return whether there is something to do between steps, also if no step is due."""
        now = self._clock()
        return self.has_work or self._has_disk_work or any(each.is_moving(now) for each in self.residency.models)

    @property
    def idle_s(self) -> float:
        """Return the longest wait for messages, in seconds, if the thread is not busy."""
        is_soon = self._is_leaving or (self.disk is not None and self.disk.is_due_soon)
        return _SOON_S if is_soon else _IDLE_S

    @property
    def _is_leaving(self) -> bool:
        return any(model.state == "leaving" for model in self.residency.models)

    @property
    def default(self) -> ServedModel:
        return self.models[0]

    @property
    def facts(self) -> EngineFacts:
        return self.default.facts

    @property
    def scheduler(self) -> Scheduler:
        return self.default.scheduler

    @property
    def runner(self) -> Runner:
        """Return the runner of the default model, whose weights are in memory."""
        assert self.default.lane is not None
        return self.default.lane.runner

    @property
    def _lanes(self) -> list[Lane]:
        return [model.lane for model in self.models if model.lane is not None]

    @property
    def num_rows(self) -> int:
        """Rows that hold state on the device."""
        return sum(lane.runner.num_rows for lane in self._lanes)

    @property
    def cache_tree(self) -> MemoryAwarePrefixCache | None:
        """Return the prefix cache of all lanes; None if it is off."""
        return next((cache.tree for cache in self._caches), None)

    @property
    def _caches(self) -> list[PrefixPlanner]:
        return [cache for model in self.models if (cache := model.scheduler.prefix_cache) is not None]

    def cache_entries(self) -> list[Entry]:
        return [] if self.cache_tree is None else list(self.cache_tree.entries())

    def disk_entries(self) -> list[Entry]:
        """Return the records on disk; times are seconds since the epoch."""
        return [] if self.disk is None else self.disk.entries()

    def clear_cache(self, salts: str = "") -> int:
        """Remove cached state and image features of salts that begin with `salts`. Returns the bytes freed."""
        freed = sum(model.media.clear(salts) for model in self.models if model.media is not None)
        if self.disk is not None:
            self.disk.clear(salts)
        return freed + (0 if self.cache_tree is None else self.cache_tree.clear(salts=salts))

    def attach(self, disk: DiskTier | None, report: DiskReport) -> None:
        """Keep the prefix cache on disk too; or report why it is not kept."""
        self.disk, self._disk_settings = disk, report
        for cache in self._caches:
            cache.disk = disk

    def wake_on_news(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when something was read from disk or written."""
        if self.disk is not None:
            self.disk.wake_with(wake)

    def close(self, rest_s: Callable[[], float], deliver: Deliver) -> None:
        """End the work on other threads. While `rest_s` returns a time, write state that is not on disk yet."""
        if self.disk is None:
            return
        try:
            if rest_s() > 0:
                self._aborts += [seq_id for cache in self._caches for seq_id in cache.seq_ids]
                for model in self.models:
                    self.step(deliver, model)  # rows leave their state behind
                self.disk.write_all(rest_s)
        finally:
            self.disk.close()

    def free(self) -> None:
        """Free weights and cached state at the end, because the event loop still knows the models."""
        for model in self.models:
            model.lane = None
            if model.media is not None:
                model.media.clear()
        if self.cache_tree is not None:
            self.cache_tree.clear()

    def _look_after_disk(self, *, is_idle: bool) -> None:
        if self.disk is not None:
            self._has_disk_work = self.disk.tick(is_idle=is_idle, is_last=self._is_leaving)

    def wake(self) -> None:
        """Step again: images for which rows wait are ready, or something was read or written."""
        for lane in self._lanes:
            lane.is_stalled = False
        self._look_after_disk(is_idle=self._is_idle)

    @property
    def _is_idle(self) -> bool:
        return not any(model.is_busy for model in self.residency.models)

    def add(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            model = self.models[seq.model]
            self._wake(model)
            model.residence.use(self._clock())
            if model.residence.holds_back:
                model.residence.held.append(seq)
            else:
                model.scheduler.add(seq)

    def _wake(self, model: ServedModel) -> None:
        if model.lane is not None:
            model.lane.is_stalled = False

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences at the start of the next step."""
        self._aborts += seq_ids

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Keep only the first `num_tokens` of a sequence that has ended or is about to end."""
        self._wake(self.models[seq.model])
        self.models[seq.model].scheduler.keep(seq, num_tokens)

    def report(self) -> EngineReport:
        """Describe the present state."""
        tree, now = self.cache_tree, self._clock()
        return EngineReport(
            num_steps=self.num_steps,
            device=self.watch.usage(),
            lanes=tuple(model.report(now) for model in self.models),
            images=image_status(*(model.images for model in self.models)),
            drafts=draft_status(self.facts.no_drafts, *(model.scheduler.speculation for model in self.models)),
            cache=None if tree is None else tree.stats,
            disk=self._disk_settings if self.disk is None else self.disk.report(),
            reading=frozenset() if self.disk is None else self.disk.reader.reading,
            ranks=self.rank_reports(),
        )

    def rest(self) -> None:
        """Free what only a next step would use. Called when no step is due."""
        for lane in self._lanes:
            lane.runner.rest()

    # -- weights come and leave

    def move(self, deliver: Deliver) -> None:
        """Let weights leave, or bring them nearer, if it is time. Called between two steps. Raises EngineDead."""
        self._check_alive()
        if len(self.models) > 1:
            self.residency.measure(self._clock())
            while (leaving := self.residency.model_to_leave(self._clock())) is not None:
                self.evict(self._model_of(leaving))
        for model in self.models:
            is_written = self.disk is None or self.disk.is_written
            event = model.residence.due(self._clock(), is_written=is_written)
            if event is not None or model.residence.state in ("loading", "failed"):
                self._do(partial(self._move, model, event, deliver), model, deliver)

    def _move(self, model: ServedModel, event: Event | None, deliver: Deliver) -> None:
        fault = None
        if event is not None:
            self._take_event(model, event)
            cache = model.scheduler.prefix_cache
            if event == "written" and cache is not None and cache.disk is not None:
                cache.disk.free_memory(cache.fingerprint)
                mx.clear_cache()
        elif model.residence.state == "loading":
            fault = self._advance(model)
            if model.lane is not None:
                self._take(model, StepOutput(failed=tuple(model.cut_waiting())), deliver)
        if (refusal := model.residence.refusal(self._clock())) is not None:
            model.residence.release(model.residence.held)
            waiting = tuple((seq.seq_id, refusal) for seq in model.scheduler.waiting)
            self._take(model, StepOutput(failed=waiting), deliver)
        if device_fault(fault) is Fault.OUT_OF_MEMORY:  # the load has failed by it, but it may be that of a row's step
            fault = DeviceFault(f"A step may have failed while weights were read: {fault}") if self.num_rows else None
        if fault is not None:
            raise fault

    def _advance(self, model: ServedModel) -> Exception | None:
        """Read the next slice. Returns the device fault that it met."""
        try:
            if model.advance():
                self._take_event(model, "read")
                message = "%s is loaded after %.1f s; to build it took %.0f ms, in which nothing else ran"
                logger.info(message, model.name, model.residence.load_s, 1000 * model.build_s)
            return None
        except ConfigError as error:
            fault = error.__cause__ if isinstance(error.__cause__, Exception) else None
            is_lack = device_fault(fault) is Fault.OUT_OF_MEMORY
            lack = f"The device has no memory for the weights now ({first_line(fault or error)})."
            clear_locals(error)  # a frame may refer to the error, so that only a collection would free the weights
            self._take_event(model, "fail", cause=lack if is_lack else error.message)
            return fault if device_fault(fault) is not None else None

    def _take_event(
        self, model: ServedModel, event: Event, *, reason: Reason = "request", cause: str | None = None
    ) -> None:
        """Take in an event of a model's weights, and carry out the action that follows."""
        if event == "fail":
            logger.error("%s could not be loaded: %s", model.name, cause)
        action = self.residency.take(model.residence, event, self._clock(), reason=reason, cause=cause)
        try:
            model.act(action)
        except ModelLoadError as error:
            self._take_event(model, "fail", cause=error.message)
        if action == "free":
            self.residency.measure(self._clock())  # image features have left, too

    def load(self, model: ServedModel) -> None:
        """Begin to load the weights by command. Models without work leave for them. Raises ModelUnavailable."""
        while (leaving := self.residency.model_to_leave_for(model.residence, self._clock())) is not None:
            self.evict(self._model_of(leaving))
        self._take_event(model, "load", reason="command")

    def evict(self, model: ServedModel) -> None:
        """Free the weights of a model without rows, for the sake of another model."""
        self._take_event(model, "evict")

    def unload(self, model: ServedModel) -> None:
        """Let the weights leave by command, once what ended requests have left to do is done.

        Called while no request is open. Raises ModelBusy if the weights never leave.
        """
        if model.residence.no_unload is not None:
            raise ModelBusy(model.residence.no_unload)
        self._take_event(model, "unload")

    def _model_of(self, resident: Resident) -> ServedModel:
        return next(model for model in self.models if model.residence is resident)

    def yield_memory(self, deliver: Deliver) -> None:
        """Give memory back at rest, and under pressure. A step without work sees the pressure."""
        if self.watch.has_news:
            self.step(deliver)
        self.rest()
        if (now := self._clock()) >= self._returned_s + _RETURN_EVERY_S:
            self._returned_s = now
            return_freed_memory(ctypes.CDLL(None))
        self._look_after_disk(is_idle=self._is_idle)

    def step(self, deliver: Deliver, model: ServedModel | None = None) -> None:
        """Run one step of a model; without one, of the model that was served least.

        Tokens are delivered before the prefill of the same step runs. If a step fails as a whole, its sequences restart
        or fail; the next step starts clean. Raises EngineDead.
        """
        self._check_alive()
        self.num_steps += 1
        now = self._clock()
        if self._aborts:
            self._do(self._abort, self._last, deliver)
        busy = [each for each in self.models if each.has_work]
        lanes = {at: each.lane for at, each in enumerate(self.models) if each in busy and each.lane is not None}
        if model is None:
            unloaded = next((each for each in busy if each.lane is None), self.default)
            model = self.models[self._turn(lanes, now)] if lanes else unloaded
        if busy and model.residence.state == "ready":
            model.residence.use(now)
        self._do(partial(self._step, model, deliver, now, is_alone=len(busy) < 2), model, deliver)
        if lanes and len(self.models) > 1:
            tenants = {at: lane.scheduler.turns.tenants for at, lane in lanes.items()}
            self._turns.charge(self.models.index(model), self._clock() - now, tenants)
        self._last = model

    def _abort(self) -> None:
        while self._aborts:
            seq_id = self._aborts.pop()
            for model in self.residency.models:
                model.abort(seq_id)

    def _turn(self, lanes: Mapping[int, Lane], now: float) -> int:
        """Return the lane that was served least; or one whose replies can wait no longer, which decodes only."""
        at, slack_s = self._turns.next(lanes.keys()), None
        others = lanes.keys() - {at}
        if others and lanes[at].residence.is_outgrown:  # the last rows give memory back before another step takes it
            running = (each for each, lane in lanes.items() if lane.scheduler.num_running)
            at, slack_s = max(running, key=lambda each: lanes[each].scheduler.room.first_id), 0.0
        elif others:
            urgent = min(sorted(others), key=lambda other: lanes[other].slack_s(now))
            slack_s = lanes[urgent].slack_s(now)
            self._num_urgent += 1
            if slack_s < lanes[at].wanted_s and self._num_urgent <= len(others):
                at, slack_s = urgent, 0.0
            else:
                self._num_urgent = 0
        lanes[at].pace(slack_s)
        return at

    def _step(self, model: ServedModel, deliver: Deliver, now: float, *, is_alone: bool) -> None:
        """Run a step. If other models are busy, it waits for its own samples, so that no other model's step does."""
        if (lane := model.lane) is None:
            self._take(model, StepOutput(overrun=self.watch.overrun()), deliver)  # trims are done, and caches give way
            return
        lane.is_stalled = False
        plan = model.scheduler.schedule(now, is_alone=is_alone)
        self._raise_fault(model)
        has_news = self._take(model, lane.runner.decode(plan), deliver)
        lane.decoded_s = self._clock()
        lane.is_stalled = plan == NO_WORK and not has_news and model.scheduler.awaits_inputs
        if plan.prefill:
            self._longest_chunk = max(chunk.end - chunk.start for chunk in plan.prefill)
            self._take(model, lane.runner.prefill(plan.prefill), deliver)
        self._look_after_disk(is_idle=False)

    def _do(self, work: Callable[[], None], model: ServedModel, deliver: Deliver) -> None:
        """Do a model's work, and recover from the error that ends it: the model's own, or the device's.

        Raises EngineDead.
        """
        self._longest_chunk = 0
        with Fence("the engine, which continues with its next step") as fence:
            work()
        if fence.error is not None:
            self.recover(fence.error, deliver, self._longest_chunk, model)

    def ask(self, question: Callable[["LLMEngine"], T], deliver: Deliver) -> T:
        """Answer a question between two steps. A device fault in the answer resets all rows, and is raised too.

        Raises EngineDead. The next step raises it again: the end belongs to the engine, not to the question alone.
        """
        self._check_alive()
        try:
            return question(self)
        except RuntimeError as error:
            if device_fault(error) is not None:
                self.recover(error, deliver)
            raise

    def recover(
        self, error: Exception, deliver: Deliver, num_tokens: int = 0, model: ServedModel | None = None
    ) -> None:
        """Drop the rows, so that the next step starts clean, and let their sequences restart or fail.

        A device fault is everyone's; another error is that of `model`. `num_tokens`: the longest chunk that ran, if any
        did. Raises EngineDead after several device faults without a good step in between, because then only a new
        process helps; and at once if the ranks of a model have parted, because a wait for the device may then hang.
        """
        fault = device_fault(error)
        if fault is Fault.PARTED:
            self._end = EngineDead(f"Only a restart of all ranks of the model helps: {first_line(error, 300)}")
            raise self._end
        models = self.models if fault is not None or model is None else (model,)
        for each in models:
            if each.lane is not None:
                if fault is not None:
                    each.lane.runner.drain()
                each.lane.runner.reset()
            if each.residence.state == "loading":  # arrays may be damaged, so that the load begins again
                self._take_event(each, "fail" if fault is None else "damage", cause=first_line(error))
        if fault is not None:
            self._num_faults += 1
            logger.error("Device fault %d since the last good step: %s", self._num_faults, error)
        if self._num_faults >= MAX_FAULTS:
            self._end = EngineDead(
                f"The GPU failed {self._num_faults} times in a row, so that only a restart of the server helps: "
                f"{first_line(error, 300)}"
            )
            raise self._end
        failure = GenerationError(f"The engine could not complete a step: {type(error).__name__}: {error}")
        for each in models:
            deliver(each.scheduler.recover(failure, fault, num_tokens if each is model else 0))

    def _check_alive(self) -> None:
        """Raise EngineDead if an earlier call has met the end, also if its caller kept that to itself."""
        if self._end is not None:
            raise self._end

    def _take(self, model: ServedModel, output: StepOutput, deliver: Deliver) -> bool:
        """Deliver the results of decode or prefill. Returns whether there are any. Raises a device fault after that."""
        if output.tokens or output.prefilled:
            self._num_faults = 0
        if updates := model.scheduler.update(output):
            deliver(updates)
        self._raise_fault(model)
        return bool(updates)

    @staticmethod
    def _raise_fault(model: ServedModel) -> None:
        """Raise the device fault that a change of cached state met, once nothing else is lost by it."""
        if model.scheduler.prefix_cache is not None:
            model.scheduler.prefix_cache.raise_fault()
