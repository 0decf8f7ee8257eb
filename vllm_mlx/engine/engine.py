"""The engine: schedule → decode → prefill → update, one step at a time; and the one thread, owner of MLX, that runs it.

Other threads only send messages, which the thread handles between two steps.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from ..cache.stats import DiskReport, Entry
from ..cache.tree import PrefixTree
from ..core.errors import EngineDead, GenerationError, first_line
from ..core.faults import MAX_FAULTS, device_fault
from ..core.fence import Fence
from ..core.sequence import Sequence
from ..core.step import SequenceUpdate, StepOutput, StepPlan
from ..core.tasks import call_at_exit, raise_in, settle
from ..disk.tier import DiskTier
from ..runner.device import DeviceWatch
from ..runner.runner import Runner
from ..scheduler.scheduler import Scheduler
from .monitoring.schema import EngineFacts, EngineReport
from .monitoring.status import draft_status, image_status

logger = logging.getLogger(__name__)
T = TypeVar("T")
_EXIT_S = 60.0  # at the end of the process, for the running step or the part of loading that cannot be interrupted
_IDLE_S = 1.0  # without work, the thread looks this often whether other programs lack memory
_SOON_S = 0.2  # and this often while state is to be written soon
Deliver = Callable[[list[SequenceUpdate]], None]


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, watch: DeviceWatch, facts: EngineFacts):
        self.facts = facts
        self.disk: DiskTier | None = None
        self._disk_settings: DiskReport | None = None  # reported without a tier; None if a setting turns it off
        self._has_disk_work = False  # whether it has more to do at once
        self.scheduler = scheduler
        self.runner = runner
        self.watch = watch
        self._aborts: list[int] = []  # handled in the next step, inside its fence, because an abort captures state
        self._is_stalled = False
        self._num_faults = 0  # device faults since the last good step
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step can do anything before the next message."""
        return bool(self._aborts) or (self.scheduler.has_work and not self._is_stalled)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do between steps, also if no step is due."""
        return self.has_work or self._has_disk_work

    @property
    def idle_s(self) -> float:
        """How long the thread may wait for messages if it is not busy."""
        return _SOON_S if self.disk is not None and self.disk.is_due_soon else _IDLE_S

    @property
    def num_rows(self) -> int:
        """Rows that hold state on the device."""
        return self.runner.num_rows

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
        media = self.runner.media
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
            self._has_disk_work = self.disk.tick(is_idle=is_idle)

    def live_bytes(self) -> int:
        return self.runner.live_bytes()

    def wake(self) -> None:
        """Step again: images for which rows wait are ready, or something was read or written."""
        self._is_stalled = False
        self._look_after_disk(is_idle=not self.scheduler.has_work)

    def add(self, seqs: Iterable[Sequence]) -> None:
        self._is_stalled = False
        for seq in seqs:
            self.scheduler.add(seq)

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
        media = self.runner.media if self.facts.info.takes_images else None
        return EngineReport(
            num_steps=self.num_steps,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_preemptions=self.scheduler.num_preemptions,
            num_restarts=self.scheduler.num_restarts,
            live_bytes=self.runner.live_bytes(),
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
        )

    def rest(self) -> None:
        """Free what only a next step would use. Called when no step is due."""
        self.runner.rest()

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
        plan, num_tokens = StepPlan(), 0
        with Fence("the engine, which continues with its next step") as fence:
            while self._aborts:
                self.scheduler.abort(self._aborts.pop())
            plan = self.scheduler.schedule(time.monotonic())
            self._raise_fault()
            has_news = self._take(self.runner.decode(plan), deliver)
            self._is_stalled = plan == StepPlan() and not has_news and self.scheduler.awaits_inputs
            if plan.prefill:
                num_tokens = max(chunk.end - chunk.start for chunk in plan.prefill)
                self._take(self.runner.prefill(plan.prefill), deliver)
            self._look_after_disk(is_idle=False)
        if fence.error is not None:
            self.recover(fence.error, deliver, num_tokens)

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
        self.runner.reset()
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


@dataclass(frozen=True, slots=True)
class _Question:
    """A question of another thread, which waits for the answer."""

    ask: Callable[[Engine], object]
    answer: "Future[object]"


_Message = Callable[[Engine], None] | _Question | None  # None: stop


class EngineThread:
    """Runs one engine on a thread of its own. `facts` are known after `start`."""

    facts: EngineFacts

    def __init__(self, load: Callable[[], Engine]):
        self._load = load
        self._deliver: Deliver = _nobody_listens
        self._died: Callable[[EngineDead], None] = _nobody_listens
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._loaded: Future[EngineFacts] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ended = threading.Event()
        self._save_until_s = 0.0  # by the monotonic clock
        self._end: EngineDead | None = None  # set once no message is handled any more
        self.step_started_s: float | None = None  # start of the running step, by the monotonic clock
        self.error: EngineDead | None = None  # why the thread ended, unless `stop` ended it

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def start(self) -> None:
        """Load on the engine thread and wait for it. Raises the error of loading."""
        call_at_exit(self._end_with_process)
        self._thread.start()
        self.facts = self._loaded.result()

    def listen(self, deliver: Deliver, died: Callable[[EngineDead], None]) -> None:
        """Set what the thread calls with updates and when it dies, before any sequence is added."""
        self._deliver, self._died = deliver, died

    def check_alive(self) -> None:
        """Raises EngineDead if the thread has ended by an error."""
        if self.error is not None:
            raise self.error

    def add(self, seqs: Items[Sequence]) -> None:
        self._inbox.put(lambda engine: engine.add(seqs))

    def abort(self, seq_ids: Items[int]) -> None:
        """End sequences before the next step, that is, within one prefill chunk."""
        self._inbox.put(lambda engine: engine.abort(seq_ids))

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Keep only the first `num_tokens` of a sequence in the prefix cache, once the sequence has ended."""
        self._inbox.put(lambda engine: engine.keep(seq, num_tokens))

    def wake(self) -> None:
        """Step again: images for which rows wait are ready, or the disk threads have results to collect."""
        self._inbox.put(Engine.wake)

    def inspect(self, ask: Callable[[Engine], T]) -> "Future[T]":
        """Call `ask` between two steps. The future may be cancelled; it fails with EngineDead once the thread ends."""
        answer: Future[T] = Future()
        self._inbox.put(_Question(ask, answer))  # type: ignore[arg-type]
        if self._end is not None:
            self._refuse_questions(self._end)
        return answer

    def stop(self, timeout_s: float | None = None, save_s: float = 0.0) -> None:
        """End the thread and wait for its end. For `save_s` more, it may write state that is not on disk yet.

        A second call may leave it less time.
        """
        self._save_until_s = time.monotonic() + save_s
        self._inbox.put(None)
        self._ended.wait(None if timeout_s is None else timeout_s + save_s)

    def _end_with_process(self) -> None:
        """Stop the thread's use of MLX before Python ends, even in the middle of loading."""
        if not self._loaded.done():
            raise_in(self._thread, SystemExit)
        self.stop(_EXIT_S)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()
        threading.Event().wait()  # MLX aborts a process that exits soon after a thread that used it, so this one stays

    def _work(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        engine.wake_on_news(self.wake)
        self._loaded.set_result(engine.facts)
        try:
            while self._take_messages(engine):
                if engine.has_work:
                    self.step_started_s = time.monotonic()
                    engine.step(self._deliver)
                    self.step_started_s = None
                    if not engine.has_work:
                        engine.rest()
                else:
                    engine.yield_memory(self._deliver)
        except BaseException as error:
            logger.exception("The engine thread ended")
            message = f"The engine has stopped: {type(error).__name__}: {error}. Restart the server."
            self.error = error if isinstance(error, EngineDead) else EngineDead(message)
            self._died(self.error)
        with Fence("the end of the process"):
            engine.close(self._rest_s, self._deliver)
        self._end = self.error or EngineDead("The engine has been shut down.")
        self._refuse_questions(self._end)

    def _rest_s(self) -> float:
        return 0.0 if self.error is not None else self._save_until_s - time.monotonic()

    def _refuse_questions(self, error: EngineDead) -> None:
        """Answer questions in the inbox with an error. A caller that asks after the end calls this itself."""
        while True:
            try:
                message = self._inbox.get(block=False)
            except Empty:
                return
            if isinstance(message, _Question) and message.answer.set_running_or_notify_cancel():
                message.answer.set_exception(error)

    def _take_messages(self, engine: Engine) -> bool:
        """Handle all messages. Without work, wait a moment for one first. Returns False after a stop message."""
        block = not engine.is_busy
        while True:
            try:
                message = self._inbox.get(block, engine.idle_s)
            except Empty:
                return True
            match message:
                case None:
                    return False
                case _Question(ask, answer):
                    settle(answer, partial(engine.ask, ask, self._deliver))
                case act:
                    act(engine)
            block = False


def _nobody_listens(_: object) -> None:
    """Stand in for a callback until `listen`."""
