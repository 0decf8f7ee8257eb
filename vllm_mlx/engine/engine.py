"""The engine: schedule → decode → prefill → update, one step at a time. It belongs to the engine thread."""

import ctypes
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from typing import TypeVar

from ..cache.stats import DiskReport, Entry
from ..cache.tree import PrefixTree
from ..core.errors import EngineDead, GenerationError, ModelUnavailable, first_line
from ..core.faults import MAX_FAULTS, DeviceFault, Fault, device_fault
from ..core.fence import Fence
from ..core.sequence import Sequence
from ..core.step import NO_WORK, SequenceUpdate, StepOutput
from ..disk.tier import DiskTier
from ..ranks.figures import RankRow
from ..runner.device import DeviceWatch
from ..runner.runner import Runner
from ..scheduler.lane_turns import LaneTurns
from ..scheduler.prefix_planner import PrefixPlanner
from ..scheduler.residence import Reason
from ..scheduler.scheduler import Scheduler
from .lane import Lane
from .macos import return_freed_memory
from .monitoring.schema import EngineFacts, EngineReport
from .monitoring.status import draft_status, image_status
from .shared_memory import SharedMemory

logger = logging.getLogger(__name__)
T = TypeVar("T")
_IDLE_S = 1.0  # without work, the thread looks this often whether other programs lack memory
_RETRY_S = 30.0  # after which a model that had no room may be loaded by command again
_SOON_S = 0.2  # and this often while state is to be written soon
_RETURN_EVERY_S = 5.0  # without work, what Python and libraries freed goes back to the system this often
Deliver = Callable[[list[SequenceUpdate]], None]


class Engine:
    """Runs the steps of all lanes, one lane's at a time. What has no lane in its name is the default lane's."""

    def __init__(self, lanes: Items[Lane], watch: DeviceWatch, clock: Callable[[], float] = time.monotonic):
        """`lanes` by the positions of their models. They share one tree of cached state, if they cache any."""
        self._clock = clock
        self.lanes = tuple(lanes)
        self._memory = SharedMemory(self.lanes)
        self._turns = LaneTurns(len(lanes))
        self._last = self.lane  # it ran the last step
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

    @property
    def has_work(self) -> bool:
        """Whether a step can do anything before the next message."""
        return bool(self._aborts) or any(lane.has_work for lane in self.lanes)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do between steps, also if no step is due."""
        return self.has_work or self._has_disk_work or any(lane.is_moving for lane in self.lanes)

    @property
    def idle_s(self) -> float:
        """How long the thread may wait for messages if it is not busy."""
        is_soon = self._is_leaving or (self.disk is not None and self.disk.is_due_soon)
        return _SOON_S if is_soon else _IDLE_S

    @property
    def _is_leaving(self) -> bool:
        return any(lane.residence.state == "leaving" for lane in self.lanes)

    @property
    def lane(self) -> Lane:
        return self.lanes[0]

    @property
    def facts(self) -> EngineFacts:
        return self.lane.facts

    @property
    def scheduler(self) -> Scheduler:
        return self.lane.scheduler

    @property
    def runner(self) -> Runner:
        """The runner of the model, which is in memory."""
        assert self.lane.runner is not None
        return self.lane.runner

    @property
    def num_rows(self) -> int:
        """Rows that hold state on the device."""
        return sum(lane.runner.num_rows for lane in self.lanes if lane.runner is not None)

    @property
    def cache_tree(self) -> PrefixTree | None:
        """The prefix cache of all lanes; None if it is off."""
        return next((cache.tree for cache in self._caches), None)

    @property
    def _caches(self) -> list[PrefixPlanner]:
        return [cache for lane in self.lanes if (cache := lane.scheduler.prefix_cache) is not None]

    def cache_entries(self) -> list[Entry]:
        return [] if self.cache_tree is None else list(self.cache_tree.entries())

    def disk_entries(self) -> list[Entry]:
        """What is kept on disk; times are seconds since the epoch."""
        return [] if self.disk is None else self.disk.entries()

    def clear_cache(self, salts: str = "") -> int:
        """Remove cached state and image features of salts that begin with `salts`. Returns the bytes freed."""
        freed = sum(lane.media.clear(salts) for lane in self.lanes if lane.media is not None)
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
                for lane in self.lanes:
                    self.step(deliver, lane)  # rows leave their state behind
                self.disk.write_all(rest_s)
        finally:
            self.disk.close()

    def _look_after_disk(self, *, is_idle: bool) -> None:
        if self.disk is not None:
            self._has_disk_work = self.disk.tick(is_idle=is_idle, is_last=self._is_leaving)

    def wake(self) -> None:
        """Step again: images for which rows wait are ready, or something was read or written."""
        for lane in self.lanes:
            lane.is_stalled = False
        self._look_after_disk(is_idle=self._is_idle)

    @property
    def _is_idle(self) -> bool:
        return not any(lane.is_busy for lane in self.lanes)

    def add(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            self.lanes[seq.model].add(seq)

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences at the start of the next step."""
        self._aborts += seq_ids

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Keep only the first `num_tokens` of a sequence that has ended or is about to end."""
        self.lanes[seq.model].is_stalled = False
        self.lanes[seq.model].scheduler.keep(seq, num_tokens)

    def report(self) -> EngineReport:
        """Describe the present state."""
        tree = self.cache_tree
        return EngineReport(
            num_steps=self.num_steps,
            device=self.watch.usage(),
            lanes=tuple(lane.report() for lane in self.lanes),
            images=image_status(*(lane.images for lane in self.lanes)),
            drafts=draft_status(self.facts.no_drafts, *(lane.scheduler.speculation for lane in self.lanes)),
            cache=None if tree is None else tree.stats,
            disk=self._disk_settings if self.disk is None else self.disk.report(),
            reading=frozenset() if self.disk is None else self.disk.reader.reading,
            ranks=self.rank_reports(),
        )

    def rest(self) -> None:
        """Free what only a next step would use. Called when no step is due."""
        for lane in self.lanes:
            if lane.runner is not None:
                lane.runner.rest()

    def move(self, deliver: Deliver) -> None:
        """Let the weights leave, or bring them nearer, if it is time. Called between two steps. Raises EngineDead."""
        self._check_alive()
        self._memory.settle()
        for lane in self.lanes:
            if not lane.is_settled:
                before = lane.residence.state
                self._do(partial(self._move, lane, deliver), lane, deliver)
                if lane.residence.state != before:
                    self._memory.measure()

    def _move(self, lane: Lane, deliver: Deliver) -> None:
        refusal, fault = lane.move(self.disk)
        if refusal is not None:
            waiting = tuple((seq.seq_id, refusal) for seq in lane.scheduler.waiting)
            self._take(lane, StepOutput(failed=waiting), deliver)
        if device_fault(fault) is Fault.OUT_OF_MEMORY:  # the load has failed by it, but it may be that of a row's step
            fault = DeviceFault(f"A step may have failed while weights were read: {fault}") if self.num_rows else None
        if fault is not None:
            raise fault

    def load(self, lane: Lane, reason: Reason = "command") -> None:
        """Begin to load the weights without a request. Models without work leave for them. Raises ModelUnavailable."""
        self._memory.measure()
        others = self._memory.others(lane)
        idle = [other for other in others if other.may_leave and not other.is_busy]
        beside = ", ".join(other.name for other in others if other not in idle and other.residence.takes_memory)
        if beside and not lane.fits_after(sum(other.leaving_bytes for other in idle)):
            raise ModelUnavailable(
                f"The weights have no room beside {beside}. Wait until what these models run has ended, or unload one.",
                retry_after_s=_RETRY_S,
            )
        for other in sorted(idle, key=lambda other: other.residence.used_s):
            if not lane.fits_after(0):
                other.leave()
                self._memory.measure()
        lane.load(reason)
        self._memory.measure()

    def yield_memory(self, deliver: Deliver) -> None:
        """Give memory back at rest, and under pressure. A step without work sees the pressure."""
        if self.watch.has_news:
            self.step(deliver)
        self.rest()
        if (now := self._clock()) >= self._returned_s + _RETURN_EVERY_S:
            self._returned_s = now
            return_freed_memory(ctypes.CDLL(None))
        self._look_after_disk(is_idle=self._is_idle)

    def step(self, deliver: Deliver, lane: Lane | None = None) -> None:
        """Run one step of a lane; without one, of the lane that was served least.

        Tokens are delivered before the prefill of the same step runs. If a step fails as a whole, its sequences restart
        or fail; the next step starts clean. Raises EngineDead.
        """
        self._check_alive()
        self.num_steps += 1
        now = self._clock()
        if self._aborts:
            self._do(self._abort, self._last, deliver)
        busy = [at for at, each in enumerate(self.lanes) if each.has_work]
        if lane is None:
            lane = self._lane_in_turn(busy, now) if busy else self.lane
        if busy and lane.residence.state == "ready":
            lane.residence.use(now)
        self._do(partial(self._step, lane, deliver, now, is_alone=len(busy) < 2), lane, deliver)
        if busy and len(self.lanes) > 1:
            tenants = {at: self.lanes[at].scheduler.turns.tenants for at in busy}
            self._turns.charge(self.lanes.index(lane), self._clock() - now, tenants)
        self._last = lane

    def _abort(self) -> None:
        while self._aborts:
            seq_id = self._aborts.pop()
            for lane in self.lanes:
                lane.abort(seq_id)

    def _lane_in_turn(self, busy: Items[int], now: float) -> Lane:
        """Return the lane that was served least; or one whose replies can wait no longer, which decodes only."""
        lane = self.lanes[self._turns.next(busy)]
        others = [self.lanes[at] for at in busy if self.lanes[at] is not lane]
        if not others:
            lane.pace(None)
            return lane
        if lane.is_outgrown:  # the lane whose rows came last gives memory back before another step takes it
            running = (each for each in (lane, *others) if each.scheduler.num_running)
            lane = max(running, key=lambda each: each.scheduler.room.first_id)
            lane.pace(0.0)
            return lane
        urgent = min(others, key=lambda other: other.slack_s(now))
        slack_s = urgent.slack_s(now)
        self._num_urgent += 1
        if slack_s < lane.wanted_s and self._num_urgent <= len(others):
            urgent.pace(0.0)
            return urgent
        self._num_urgent = 0
        lane.pace(slack_s)
        return lane

    def _step(self, lane: Lane, deliver: Deliver, now: float, *, is_alone: bool) -> None:
        """Run a step. If other lanes are busy, it waits for its own samples, so that no other lane's step does."""
        lane.is_stalled = False
        if (runner := lane.runner) is None:
            self._take(lane, StepOutput(overrun=self.watch.overrun()), deliver)  # trims are done, and caches give way
            return
        plan = lane.scheduler.schedule(now, is_alone=is_alone)
        lane.raise_fault()
        has_news = self._take(lane, runner.decode(plan), deliver)
        lane.decoded_s = self._clock()
        lane.is_stalled = plan == NO_WORK and not has_news and lane.scheduler.awaits_inputs
        if plan.prefill:
            self._longest_chunk = max(chunk.end - chunk.start for chunk in plan.prefill)
            self._take(lane, runner.prefill(plan.prefill), deliver)
        self._look_after_disk(is_idle=False)

    def _do(self, work: Callable[[], None], lane: Lane, deliver: Deliver) -> None:
        """Do a lane's work, and recover from the error that ends it: the lane's own, or the device's.

        Raises EngineDead.
        """
        self._longest_chunk = 0
        with Fence("the engine, which continues with its next step") as fence:
            work()
        if fence.error is not None:
            self.recover(fence.error, deliver, self._longest_chunk, lane)

    def ask(self, question: Callable[["Engine"], T], deliver: Deliver) -> T:
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

    def recover(self, error: Exception, deliver: Deliver, num_tokens: int = 0, lane: Lane | None = None) -> None:
        """Drop the rows, so that the next step starts clean, and let their sequences restart or fail.

        A device fault is everyone's; another error is that of `lane`. `num_tokens`: the longest chunk that ran, if any
        did. Raises EngineDead after several device faults without a good step in between, because then only a new
        process helps; and at once if the ranks of a model have parted, because a wait for the device may then hang.
        """
        fault = device_fault(error)
        if fault is Fault.PARTED:
            self._end = EngineDead(f"Only a restart of all ranks of the model helps: {first_line(error, 300)}")
            raise self._end
        lanes = self.lanes if fault is not None or lane is None else (lane,)
        for each in lanes:
            each.reset(error, is_damaged=fault is not None)
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
        for each in lanes:
            deliver(each.scheduler.recover(failure, fault, num_tokens if each is lane else 0))

    def _check_alive(self) -> None:
        """Raise EngineDead if an earlier call has met the end, also if its caller kept that to itself."""
        if self._end is not None:
            raise self._end

    def _take(self, lane: Lane, output: StepOutput, deliver: Deliver) -> bool:
        """Deliver the results of decode or prefill. Returns whether there are any. Raises a device fault after that."""
        if output.tokens or output.prefilled:
            self._num_faults = 0
        if updates := lane.scheduler.update(output):
            deliver(updates)
        lane.raise_fault()
        return bool(updates)
