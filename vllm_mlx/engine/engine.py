"""The engine: schedule → decode → prefill → update, one step at a time. It belongs to the engine thread."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..cache.stats import DiskReport, Entry
from ..cache.tree import PrefixTree
from ..core.errors import EngineDead, GenerationError, first_line
from ..core.faults import MAX_FAULTS, device_fault
from ..core.fence import Fence
from ..core.sequence import Sequence
from ..core.step import SequenceUpdate, StepOutput, StepPlan
from ..disk.tier import DiskTier
from ..runner.device import DeviceWatch
from ..runner.runner import Runner
from ..scheduler.scheduler import Scheduler
from .lane import Lane, Reload
from .monitoring.schema import EngineFacts, EngineReport
from .monitoring.status import draft_status, image_status

logger = logging.getLogger(__name__)
T = TypeVar("T")
_IDLE_S = 1.0  # without work, the thread looks this often whether other programs lack memory
_SOON_S = 0.2  # and this often while state is to be written soon
Deliver = Callable[[list[SequenceUpdate]], None]


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, watch: DeviceWatch, facts: EngineFacts, reload: Reload):
        self.facts = facts
        self.disk: DiskTier | None = None
        self._disk_settings: DiskReport | None = None  # reported without a tier; None if a setting turns it off
        self._has_disk_work = False  # whether it has more to do at once
        self.scheduler = scheduler
        self.lane = Lane(scheduler, runner, reload)
        self.watch = watch
        self._aborts: list[int] = []  # handled in the next step, inside its fence, because an abort captures state
        self._is_stalled = False
        self._longest_chunk = 0  # tokens that the running step computes for one row
        self._num_faults = 0  # device faults since the last good step
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step can do anything before the next message."""
        if self.lane.runner is None:
            return bool(self._aborts) or self.lane.has_trims
        return bool(self._aborts) or (self.scheduler.has_work and not self._is_stalled)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do between steps, also if no step is due."""
        return self.has_work or self._has_disk_work or self.lane.is_moving

    @property
    def idle_s(self) -> float:
        """How long the thread may wait for messages if it is not busy."""
        is_soon = self.lane.is_leaving or (self.disk is not None and self.disk.is_due_soon)
        return _SOON_S if is_soon else _IDLE_S

    @property
    def runner(self) -> Runner:
        """The runner of the model, which is in memory."""
        assert self.lane.runner is not None
        return self.lane.runner

    @property
    def num_rows(self) -> int:
        """Rows that hold state on the device."""
        return 0 if self.lane.runner is None else self.lane.runner.num_rows

    @property
    def cache_tree(self) -> PrefixTree | None:
        """The prefix cache; None if it is off."""
        cache = self.scheduler.prefix_cache
        return None if cache is None else cache.tree

    def cache_entries(self) -> list[Entry]:
        return [] if self.cache_tree is None else list(self.cache_tree.entries())

    def disk_entries(self) -> list[Entry]:
        """What is kept on disk; times are seconds since the epoch."""
        return [] if self.disk is None else self.disk.entries()

    def clear_cache(self, salts: str = "") -> int:
        """Remove cached state and image features of salts that begin with `salts`. Returns the bytes freed."""
        media = self.lane.media
        freed = 0 if media is None else media.clear(salts)
        if self.disk is not None:
            self.disk.clear(salts)
        return freed + (0 if self.cache_tree is None else self.cache_tree.clear(salts=salts))

    def attach(self, disk: DiskTier | None, report: DiskReport) -> None:
        """Keep the prefix cache on disk too; or report why it is not kept."""
        assert self.scheduler.prefix_cache is not None
        self.disk = self.scheduler.prefix_cache.disk = disk
        self._disk_settings = report

    def wake_on_news(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when something was read from disk or written."""
        if self.disk is not None:
            self.disk.wake_with(wake)

    def close(self, rest_s: Callable[[], float], deliver: Deliver) -> None:
        """End the work on other threads. While `rest_s` returns a time, write state that is not on disk yet."""
        cache = self.scheduler.prefix_cache
        if self.disk is None or cache is None:
            return
        try:
            if rest_s() > 0:
                self._aborts += cache.seq_ids
                self.step(deliver)  # rows leave their state behind
                self.disk.write_all(rest_s)
        finally:
            self.disk.close()

    def _look_after_disk(self, *, is_idle: bool) -> None:
        if self.disk is not None:
            self._has_disk_work = self.disk.tick(is_idle=is_idle, is_last=self.lane.is_leaving)

    def live_bytes(self) -> int:
        return 0 if self.lane.runner is None else self.lane.runner.live_bytes()

    def wake(self) -> None:
        """Step again: images for which rows wait are ready, or something was read or written."""
        self._is_stalled = False
        self._look_after_disk(is_idle=not self.scheduler.has_work)

    def add(self, seqs: Iterable[Sequence]) -> None:
        self._is_stalled = False
        for seq in seqs:
            self.scheduler.add(seq)
        self.lane.residence.use(time.monotonic())

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences at the start of the next step."""
        self._aborts += seq_ids

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Keep only the first `num_tokens` of a sequence that has ended or is about to end."""
        self._is_stalled = False
        self.scheduler.keep(seq, num_tokens)

    def report(self) -> EngineReport:
        """Describe the present state."""
        cache = self.scheduler.prefix_cache
        media = self.lane.media if self.facts.info.takes_images else None
        return EngineReport(
            num_steps=self.num_steps,
            num_running=self.scheduler.num_running,
            num_waiting=len(self.scheduler.waiting),
            num_preemptions=self.scheduler.num_preemptions,
            num_restarts=self.scheduler.num_restarts,
            live_bytes=self.live_bytes(),
            pool_bytes=self.scheduler.pool.num_bytes,
            num_shortened=self.scheduler.pool.num_shortened,
            device=self.watch.usage(),
            cache=None if cache is None else cache.tree.stats,
            num_skipped_captures=0 if cache is None else cache.num_skipped_captures,
            images=image_status(media),
            drafts=draft_status(self.facts.no_drafts, self.scheduler.speculation),
            media_bytes=0 if media is None else media.used_bytes,
            disk=self._disk_settings if self.disk is None else self.disk.report(),
            reading=frozenset() if self.disk is None else self.disk.reader.reading,
            lane=self.lane.report(),
        )

    def rest(self) -> None:
        """Free what only a next step would use. Called when no step is due."""
        if self.lane.runner is not None:
            self.lane.runner.rest()

    def move(self, deliver: Deliver) -> None:
        """Let the weights leave, or bring them nearer, if it is time. Called between two steps. Raises EngineDead."""
        self._longest_chunk = 0
        with self._recovering(deliver):
            refusal, fault = self.lane.move(self.disk)
            if refusal is not None:
                waiting = tuple((seq.seq_id, refusal) for seq in self.scheduler.waiting)
                self._take(StepOutput(failed=waiting), deliver)
            if fault is not None:
                raise fault

    def yield_memory(self, deliver: Deliver) -> None:
        """Give memory back under pressure, although no step is due. A step without work sees the pressure."""
        if self.watch.has_news:
            self.step(deliver)
            self.rest()
        self._look_after_disk(is_idle=not self.scheduler.has_work)

    def step(self, deliver: Deliver) -> None:
        """Run one step. Tokens are delivered before the prefill of the same step runs.

        If a step fails as a whole, its sequences restart or fail; the next step starts clean. Raises EngineDead.
        """
        self.num_steps += 1
        self._is_stalled = False
        self._longest_chunk = 0
        with self._recovering(deliver):
            while self._aborts:
                self.scheduler.abort(self._aborts.pop())
            if self.lane.runner is None:
                self._take(StepOutput(overrun=self.watch.overrun()), deliver)  # trims are done, and caches give way
                return
            plan = self.scheduler.schedule(time.monotonic())
            self._raise_fault()
            has_news = self._take(self.runner.decode(plan), deliver)
            self._is_stalled = plan == StepPlan() and not has_news and self.scheduler.awaits_inputs
            if plan.prefill:
                self._longest_chunk = max(chunk.end - chunk.start for chunk in plan.prefill)
                self._take(self.runner.prefill(plan.prefill), deliver)
            self._look_after_disk(is_idle=False)

    @contextmanager
    def _recovering(self, deliver: Deliver) -> Iterator[None]:
        """Recover from the error that ends the block. Raises EngineDead."""
        with Fence("the engine, which continues with its next step") as fence:
            yield
        if fence.error is not None:
            self.recover(fence.error, deliver, self._longest_chunk)

    def ask(self, question: Callable[["Engine"], T], deliver: Deliver) -> T:
        """Answer a question between two steps. A device fault in the answer resets all rows, and is raised too."""
        try:
            return question(self)
        except RuntimeError as error:
            if device_fault(error) is not None:
                self.recover(error, deliver)
            raise

    def recover(self, error: Exception, deliver: Deliver, num_tokens: int = 0) -> None:
        """Drop all rows, so that the next step starts clean, and let their sequences restart or fail.

        `num_tokens`: the longest chunk that ran, if any did. Raises EngineDead after several device faults without a
        good step in between, because then only a new process helps.
        """
        fault = device_fault(error)
        self.lane.reset()
        if fault is not None:
            self._num_faults += 1
            logger.error("Device fault %d since the last good step: %s", self._num_faults, error)
        if self._num_faults >= MAX_FAULTS:
            raise EngineDead(
                f"The GPU failed {self._num_faults} times in a row, so that only a restart of the server helps: "
                f"{first_line(error, 300)}"
            )
        failure = GenerationError(f"The engine could not complete a step: {type(error).__name__}: {error}")
        deliver(self.scheduler.recover(failure, fault, num_tokens))

    def _take(self, output: StepOutput, deliver: Deliver) -> bool:
        """Deliver the results of decode or prefill. Returns whether there are any. Raises a device fault after that."""
        if output.tokens or output.prefilled:
            self._num_faults = 0
        if updates := self.scheduler.update(output):
            deliver(updates)
        self._raise_fault()
        return bool(updates)

    def _raise_fault(self) -> None:
        """Raise the device fault that a change of cached state met, once nothing else is lost by it."""
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.raise_fault()
