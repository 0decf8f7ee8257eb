"""The engine: schedule → decode → prefill → update, one step at a time; and the one thread, owner of MLX, that runs it.

Other threads only send messages, which the engine thread handles between two steps.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar, TypeVarTuple

import mlx.core as mx

from ..cache.stats import DiskReport, Entry
from ..cache.tree import MemoryAwarePrefixCache
from ..core.errors import ConfigError, EngineDead, GenerationError, ModelBusy, ModelLoadError, first_line
from ..core.sequence import PromptInputs, Sequence
from ..core.step import NO_WORK, SequenceUpdate, StepOutput
from ..disk.tier import DiskTier
from ..ranks.figures import RankRow
from ..runner.device import DeviceWatch
from ..runner.runner import Runner
from ..scheduler.prefix_planner import PrefixPlanner
from ..scheduler.residence import Event, Reason, Residency
from ..scheduler.scheduler import Scheduler
from ..util.faults import DeviceFault, Fault, FaultCount, device_fault
from ..util.fence import Fence, clear_locals
from ..util.tasks import call_at_exit, do_nothing, raise_in, settle
from .lane import Lane, LaneChoice, ServedModel
from .macos import is_on_battery, return_freed_memory
from .monitoring.schema import EngineReport
from .monitoring.status import draft_status, image_status

logger = logging.getLogger(__name__)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_IDLE_S = 1.0  # without work, the thread looks this often whether other programs lack memory
_SOON_S = 0.2  # and this often while state is to be written soon
_RETURN_EVERY_S = 5.0  # without work, memory that Python and libraries freed returns to the system this often
_EXIT_S = 60.0  # at the end of the process, for the running step or the part of loading that cannot be interrupted
Deliver = Callable[[list[SequenceUpdate]], None]


class LLMEngine:
    """Runs the steps of all models, one model's at a time. Members that name no model refer to the default model."""

    def __init__(self, models: Items[ServedModel], watch: DeviceWatch, clock: Callable[[], float] = time.monotonic):
        """`models` by their positions. They share one tree of cached state, if they cache any."""
        self._clock = clock
        self._deliver: Deliver = do_nothing  # to the client, on the engine thread
        self.models = list(models)
        self.residency = Residency(self.models)
        self._choice = LaneChoice(len(models))
        self._last: ServedModel | None = None  # it ran the last step
        self.disk: DiskTier | None = None
        self._disk_settings: DiskReport | None = None  # reported without a tier; None if a setting turns it off
        self._has_disk_work = False  # whether it has more to do immediately
        self.watch = watch
        self._aborts: list[int] = []  # handled in the next step, inside its fence, because an abort captures state
        self._longest_chunk = 0  # tokens that the running work computes for one row
        self._faults = FaultCount()
        self.num_steps = 0
        self._returned_s = clock()  # when freed memory was returned to the system
        self.rank_reports: Callable[[], tuple[RankRow, ...]] = tuple  # of a model that several Macs run
        for model in models:
            model.use(self._returned_s)

    def listen(self, deliver: Deliver) -> None:
        """Set the function that is called with the updates of all steps."""
        self._deliver = deliver

    @property
    def has_work(self) -> bool:
        """Return whether a step can do anything before the next message."""
        return bool(self._aborts) or any(model.has_work for model in self.models)

    @property
    def is_busy(self) -> bool:
        """Return whether there is something to do between steps, also if no step is due."""
        now = self._clock()
        return self.has_work or self._has_disk_work or any(each.is_moving(now) for each in self.models)

    @property
    def idle_s(self) -> float:
        """Return the longest wait for messages, in seconds, if the thread is not busy."""
        is_soon = self._is_leaving or (self.disk is not None and self.disk.is_due_soon)
        return _SOON_S if is_soon else _IDLE_S

    @property
    def _is_leaving(self) -> bool:
        return any(model.state == "leaving" for model in self.models)

    @property
    def default(self) -> ServedModel:
        return self.models[0]

    @property
    def scheduler(self) -> Scheduler:
        return self.default.scheduler

    @property
    def runner(self) -> Runner:
        """Return the runner of the default model, whose weights are in memory."""
        assert self.default.lane is not None and isinstance(self.default.lane.runner, Runner)
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
        return [] if self.disk is None else list(self.disk.tree.entries())

    def clear_cache(self, salts: str = "") -> int:
        """Remove cached state and image features of salts that begin with `salts`. Returns the bytes freed."""
        freed = sum(model.clear(salts) for model in self.models)
        if self.disk is not None:
            self.disk.clear(salts)
        return freed + (0 if self.cache_tree is None else self.cache_tree.clear(salts=salts))

    def attach(self, disk: DiskTier | None, report: DiskReport) -> None:
        """Keep the prefix cache on disk too; or report why it is not kept."""
        self.disk, self._disk_settings = disk, report
        for cache in self._caches:
            cache.disk = disk

    def close(self, rest_s: Callable[[], float]) -> None:
        """End the work on other threads. While `rest_s` returns a time, write state that is not on disk yet."""
        if self.disk is None:
            return
        try:
            if rest_s() > 0:
                self._aborts += [seq_id for cache in self._caches for seq_id in cache.seq_ids]
                for model in self.models:
                    self.step(model)  # rows leave their state behind
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
        for model in self.models:
            model.wake()
        self._look_after_disk(is_idle=self._is_idle)

    @property
    def _is_idle(self) -> bool:
        return not any(model.is_busy for model in self.models)

    def add(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            model = self.models[seq.model]
            model.wake()
            model.use(self._clock())
            if model.holds_back:
                model.held.append(seq)
            else:
                model.scheduler.add(seq)

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences at the start of the next step."""
        self._aborts += seq_ids

    def keep(self, seq: Sequence, num_tokens: int, following: PromptInputs | None = None) -> None:
        """Keep only the first `num_tokens` of a sequence that ends or has ended, and the prompt that follows it."""
        self.models[seq.model].wake()
        self.models[seq.model].scheduler.keep(seq, num_tokens, following)

    def report(self) -> EngineReport:
        """Describe the present state."""
        tree, now, off_reason = self.cache_tree, self._clock(), self.default.facts.no_drafts if self.models else None
        return EngineReport(
            num_steps=self.num_steps,
            device=self.watch.usage(),
            lanes=tuple(model.report(now) for model in self.models),
            images=image_status(*(model.media for model in self.models)),
            drafts=draft_status(off_reason, *(model.scheduler.speculation for model in self.models)),
            cache=None if tree is None else tree.stats,
            disk=self._disk_settings if self.disk is None else self.disk.report(),
            reading=frozenset() if self.disk is None else self.disk.reader.reading,
            ranks=self.rank_reports(),
        )

    # -- weights come and leave

    def move(self) -> None:
        """Let weights leave, or bring them nearer, if it is time. Called between two steps. Raises EngineDead."""
        self._faults.check_alive()
        if len(self.models) > 1:
            self.residency.measure(self._clock())
            while (leaving := self.residency.model_to_leave(self._clock())) is not None:
                self.evict(leaving)
        for model in self.models:
            is_written = self.disk is None or self.disk.is_written
            event = model.due(self._clock(), is_written=is_written)
            if event is not None or model.state in ("loading", "failed"):
                with self._contained(model):
                    self._move(model, event)

    def _move(self, model: ServedModel, event: Event | None) -> None:
        fault = None
        if event is not None:
            self._take_event(model, event)
            cache = model.scheduler.prefix_cache
            if event == "written" and cache is not None and cache.disk is not None:
                cache.disk.free_memory(cache.fingerprint)
                mx.clear_cache()
        elif model.state == "loading":
            fault = self._advance(model)
            if model.lane is not None:
                self._take(model, StepOutput(failed=tuple(model.cut_waiting())))
        if (refusal := model.refusal(self._clock())) is not None:
            model.release(model.held)
            waiting = tuple((seq.seq_id, refusal) for seq in model.scheduler.waiting)
            self._take(model, StepOutput(failed=waiting))
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
                logger.info(message, model.name, model.load_s, 1000 * model.build_s)
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
        action = self.residency.take(model, event, self._clock(), reason=reason, cause=cause)
        try:
            model.act(action)
        except ModelLoadError as error:
            self._take_event(model, "fail", cause=error.message)
        if action == "free":
            self.residency.measure(self._clock())  # image features have left as well

    def load(self, model: ServedModel) -> None:
        """Begin to load the weights by command. Models without work leave for them. Raises ModelUnavailable."""
        while (leaving := self.residency.model_to_leave_for(model, self._clock())) is not None:
            self.evict(leaving)
        self._take_event(model, "load", reason="command")

    def evict(self, model: ServedModel) -> None:
        """Free the weights of a model without rows, for the sake of another model."""
        self._take_event(model, "evict")

    def unload(self, model: ServedModel) -> None:
        """Unload the weights by command, once the work that ended requests have left is done.

        Called while no request is open. Raises ModelBusy if the weights never leave.
        """
        if model.no_unload is not None:
            raise ModelBusy(model.no_unload)
        self._take_event(model, "unload")

    def yield_memory(self) -> None:
        """Give memory back at rest, and under pressure. A step without work sees the pressure."""
        if self.watch.has_news and self.models:
            self.step()
        for lane in self._lanes:
            lane.runner.rest()
        if (now := self._clock()) >= self._returned_s + _RETURN_EVERY_S:
            self._returned_s = now
            return_freed_memory(ctypes.CDLL(None))
        self._look_after_disk(is_idle=self._is_idle)
        model = next((each for each in self.models if each.lane and each.scheduler.ahead.next is not None), None)
        if model is not None and self._is_idle and self._looks_ahead:
            model.scheduler.look_ahead()

    @property
    def _looks_ahead(self) -> bool:
        """Return whether next prompts may be computed: no model comes or leaves, and memory and power suffice."""
        return self.residency.is_calm and not self.watch.is_under_pressure and not is_on_battery()

    def step(self, model: ServedModel | None = None) -> None:
        """Run one step of a model; without one, of the model that was served least.

        Tokens are delivered before the prefill of the same step runs. If a step fails as a whole, its sequences restart
        or fail; the next step starts clean. Raises EngineDead.
        """
        self._faults.check_alive()
        self.num_steps += 1
        now = self._clock()
        if self._aborts:
            with self._contained(self._last or self.default):
                while self._aborts:
                    seq_id = self._aborts.pop()
                    for each in self.models:
                        each.abort(seq_id)
        busy = [each for each in self.models if each.has_work]
        lanes = {at: each.lane for at, each in enumerate(self.models) if each in busy and each.lane is not None}
        if model is None:
            unloaded = next((each for each in busy if each.lane is None), self.default)
            model = self.models[self._choice.next(lanes, now)] if lanes else unloaded
        if busy and model.state == "ready":
            model.use(now)
        with self._contained(model):
            self._step(model, now, is_alone=len(busy) < 2)
        if lanes and len(self.models) > 1:
            tenants = {at: lane.scheduler.turns.tenants for at, lane in lanes.items()}
            self._choice.turns.charge(self.models.index(model), self._clock() - now, tenants)
        self._last = model

    def _step(self, model: ServedModel, now: float, *, is_alone: bool) -> None:
        """Run a step. If other models are busy, it waits for its own samples, so that no other model's step does."""
        if (lane := model.lane) is None:
            self._take(model, StepOutput(overrun=self.watch.overrun()))  # trims are done, and caches give way
            return
        lane.is_stalled = False
        looks_ahead = model.scheduler.ahead.running is not None and self._looks_ahead
        plan = model.scheduler.schedule(now, is_alone=is_alone, looks_ahead=looks_ahead)
        self._raise_fault(model)
        has_news = self._take(model, lane.runner.decode(plan))
        lane.decoded_s = self._clock()
        lane.is_stalled = plan == NO_WORK and not has_news and model.scheduler.awaits_inputs
        if plan.prefill:
            self._longest_chunk = max(chunk.end - chunk.start for chunk in plan.prefill)
            self._take(model, lane.runner.prefill(plan.prefill))
        self._look_after_disk(is_idle=False)

    @contextmanager
    def _contained(self, model: ServedModel) -> Iterator[None]:
        """Recover from the error that ends a model's work: the model's own, or the device's. Raises EngineDead."""
        self._longest_chunk = 0
        with Fence("the engine, which continues with its next step") as fence:
            yield
        if fence.error is not None:
            self.recover(fence.error, self._longest_chunk, model)

    def ask(self, question: Callable[["LLMEngine"], T]) -> T:
        """Answer a question between two steps. A device fault in the answer resets all rows, and is raised.

        Raises EngineDead. The next step raises it again: the end belongs to the engine, not to the question alone.
        """
        self._faults.check_alive()
        try:
            return question(self)
        except RuntimeError as error:
            if device_fault(error) is not None:
                self.recover(error)
            raise

    def recover(self, error: Exception, num_tokens: int = 0, model: ServedModel | None = None) -> None:
        """Drop the rows, so that the next step starts clean, and let their sequences restart or fail.

        A device fault is everyone's; another error is that of `model`. `num_tokens`: the longest chunk that ran, if any
        did. Raises EngineDead after several device faults without a good step in between, because then only a new
        process helps; and immediately if the ranks of a model have parted, because a wait for the device may hang.
        """
        fault = device_fault(error)
        self._faults.refuse_parted(fault, error)
        models = self.models if fault is not None or model is None else (model,)
        for each in models:
            if each.lane is not None:
                if fault is not None:
                    each.lane.runner.drain()
                each.lane.runner.reset()
            if each.state == "loading":  # arrays may be damaged, so that the load begins again
                self._take_event(each, "fail" if fault is None else "damage", cause=first_line(error))
        self._faults.count(fault, error)
        failure = GenerationError(f"The engine could not complete a step: {type(error).__name__}: {error}")
        for each in models:
            self._deliver(each.scheduler.recover(failure, fault, num_tokens if each is model else 0))

    def _take(self, model: ServedModel, output: StepOutput) -> bool:
        """Deliver the results of decode or prefill. Returns whether there are any. Raises a device fault after that."""
        if output.tokens or output.prefilled or output.encoded:
            self._faults.num = 0
        if updates := model.scheduler.update(output):
            self._deliver(updates)
        self._raise_fault(model)
        return bool(updates)

    @staticmethod
    def _raise_fault(model: ServedModel) -> None:
        """Raise the device fault that a change of cached state met, once nothing else is lost by it."""
        if model.scheduler.prefix_cache is not None:
            model.scheduler.prefix_cache.raise_fault()


@dataclass(frozen=True, slots=True)
class _Question:
    """A question of another thread, which waits for the answer."""

    ask: Callable[[LLMEngine], object]
    answer: "Future[object]"


_Act = tuple[Callable[..., None], tuple[object, ...]]  # a method of the engine, and its arguments
_Message = _Act | _Question | None  # with None, the thread stops


class EngineThread:
    """Runs one engine on a separate thread. `models` are known after `start`; other threads only read them."""

    models: list[ServedModel]

    def __init__(self, load: Callable[[], LLMEngine]):
        self._load = load
        self._died: Callable[[EngineDead], None] = do_nothing
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._loaded: Future[list[ServedModel]] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ended = threading.Event()
        self._save_until_s = 0.0  # by the monotonic clock
        self._end: EngineDead | None = None  # set once no message is handled any more
        self.step_started_s: float | None = None  # start of the running step, by the monotonic clock
        self.error: EngineDead | None = None  # the reason why the thread ended, unless `stop` ended it

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def start(self) -> None:
        """Load on the engine thread and wait for it. Raises the error of loading."""
        call_at_exit(self._end_with_process)
        self._thread.start()
        self.models = self._loaded.result()

    def listen(self, deliver: Deliver, died: Callable[[EngineDead], None]) -> None:
        """Set the functions called with updates, and when the thread dies, before any sequence is added."""
        self._died = died
        self.tell(LLMEngine.listen, deliver)

    def check_alive(self) -> None:
        """Raise EngineDead if the thread has ended by an error."""
        if self.error is not None:
            raise self.error

    def keep(self, seq: Sequence, num_tokens: int, following: PromptInputs | None = None) -> None:
        """Keep the first `num_tokens` of an ended sequence; at rest, compute the beginning of the prompt after it."""
        self.tell(LLMEngine.keep, seq, num_tokens, following)

    def wake(self) -> None:
        """Step again: images for which rows wait are ready, or the disk threads have results to collect."""
        self.tell(LLMEngine.wake)

    def tell(self, act: Callable[[LLMEngine, *Ts], None], *args: *Ts) -> None:
        """Call a method of the engine before its next step, that is, within one prefill chunk."""
        self._inbox.put((act, args))

    def inspect(self, ask: Callable[[LLMEngine], T]) -> "Future[T]":
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

    def fail(self, error: EngineDead) -> None:
        """Count as ended, though the thread may never come back, so that requests get this error. Any thread calls."""
        self.error = self._end = error
        self._ended.set()
        self._died(error)
        self._refuse_questions(error)

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
        if engine.disk is not None:
            engine.disk.wake_with(self.wake)  # when something was read or written
        self._loaded.set_result(engine.models)
        try:
            is_idle = False
            while self._take_messages(engine, engine.idle_s if is_idle and not engine.is_busy else 0.0):
                self.step_started_s = time.monotonic()
                if is_idle := not engine.has_work:
                    engine.yield_memory()
                else:
                    engine.step()
                engine.move()
                self.step_started_s = None
        except BaseException as error:
            logger.exception("The engine thread ended")
            message = f"The engine has stopped: {type(error).__name__}: {error}. Restart the server."
            self.error = self.error or (error if isinstance(error, EngineDead) else EngineDead(message))
            self._died(self.error)
        with Fence("the end of the process"):
            try:
                engine.close(self._rest_s)
            finally:
                engine.free()
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

    def _take_messages(self, engine: LLMEngine, wait_s: float) -> bool:
        """Wait up to `wait_s` for a message, and handle all. Returns False after a stop message."""
        while True:
            try:
                message = self._inbox.get(wait_s > 0, wait_s)
            except Empty:
                return True
            match message:
                case None:
                    return False
                case _Question(ask, answer):
                    settle(answer, engine.ask, ask)
                case act, args:
                    act(engine, *args)
            wait_s = 0.0
