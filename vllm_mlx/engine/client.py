"""The engine as the event loop uses it: requests in, streams of events out. It knows no mlx."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, TypeVar

from prometheus_client.core import Metric

from ..cache.stats import Entry
from ..core.config import EngineConfig
from ..core.errors import ContextLengthExceeded, EngineDead, ModelBusy, Overloaded, ShuttingDown, VLLMMLXError
from ..core.receipt import Expectation
from ..core.request import Request
from ..core.step import SequenceUpdate
from ..prompt.processor import PreparedRequest
from ..scheduler.residence import State
from .admission import AdmissionQueue
from .front import Front
from .generation import Generation, Reply
from .macos import KeepAwake
from .monitoring.counters import ReplyStats, Totals
from .monitoring.prometheus import metric_families
from .monitoring.schema import EngineReport, EngineStatus, ModelFacts
from .monitoring.status import Moment, engine_status
from .preparing import PromptPool, place_in, stack_of

if TYPE_CHECKING:  # a server without an engine does not load MLX
    from .engine import EngineThread, LLMEngine

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PATIENCE_S = 0.25  # a step may take seconds while a long prompt is prefilled
_HANGING_RETRY_S = 10.0  # a step that hangs may still end
_TRIM_S = 2.0  # time for the replies that ended last to be compared with what the next turn can contain
_STOP_S = 10.0  # time for the running step to finish
_SAVE_S = 20.0  # time to write what is not on disk yet
_HURRIED_SAVE_S = 1.0
_LOOK_S = 0.02  # between two looks at a model that comes or leaves
_MOST_SHOWN = 5  # requests that an error names


class EngineClient:
    """Serves requests. All methods are called on one event loop, except the callbacks of the engine thread."""

    def __init__(
        self,
        config: EngineConfig,
        fronts: Items[Front],
        thread: "EngineThread",
        pool: PromptPool,
    ):
        """`thread` has started. `fronts` are the models by their positions; the first is the default."""
        self.fronts, default = tuple(fronts), fronts[0]
        self.memories = default.memories
        self.processor, self.preparations = default.processor, default.preparations
        self._thread = thread
        self.pool = pool
        self._monitor = Monitor(config, self.fronts, thread, pool)
        self.queue = AdmissionQueue(config, self._running_replies, self._in_the_way if len(fronts) > 1 else None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awake = KeepAwake(enabled=config.keep_awake)
        self.generations: dict[int, Generation] = {}  # by sequence id
        self._seq_ids = itertools.count()
        self._is_closing = False
        thread.listen(self._deliver, self._engine_died)
        self._residents = [model.residence for model in thread.models]
        for resident in self._residents:  # loads of other models do not count as time without a request
            resident.use(time.monotonic())

    @property
    def model_facts(self) -> ModelFacts:
        """Return the facts of the default model."""
        return self.fronts[0].model_facts

    @property
    def is_healthy(self) -> bool:
        return self.error() is None

    @property
    def is_dead(self) -> bool:
        """Return whether the engine has ended for good, so that the process has to be started again."""
        return self._thread.error is not None

    def error(self) -> str | None:
        """Return the reason why no request can be served: a thread has ended or hangs. None if all is well."""
        return self._monitor.error()

    async def submit(self, request: Request) -> Generation:
        """Render, check and queue a request. The caller must enter the generation at once; leaving it ends it.

        Raises RequestError before anything is generated, EngineDead if nothing can be generated, and Overloaded while
        the server shuts down or if the queue is full.
        """
        self._check_open()
        self._residents[request.model].use(time.monotonic())
        self._loop = asyncio.get_running_loop()
        async with self.queue.preparing(request, request.sampling.n):
            prepared, progress = await self.fronts[request.model].preparations.prepare(request)
        self._check_open()
        replies = {reply.seq.seq_id: reply for reply in self._replies(prepared, progress)}
        generation = Generation(
            prepared,
            replies,
            self.fronts[request.model].keeper,
            abort=self._thread.abort,
            closed=self._forget,
        )
        self.queue.watch(generation)
        self._awake.hold()
        self.generations |= dict.fromkeys(generation.seq_ids, generation)
        self._thread.add([reply.seq for reply in replies.values()])
        return generation  # from here on the caller owns it: nothing after `add` may fail

    def watch_preparing(self, changed: Callable[[bool], None]) -> None:
        """Call `changed` with True when threads begin to prepare prompts, and with False when none does.

        It is called on these threads, or on the event loop.
        """
        self.pool.watch(changed)

    async def count_tokens(self, request: Request) -> int:
        """Count the tokens of the prompt that `submit` would run, even if it is too long to run.

        Raises RequestError; ContextLengthExceeded for a prompt that is so long that it is not tokenised.
        """
        try:
            async with self.queue.preparing(request, 1):
                prepared, _ = await self.fronts[request.model].preparations.prepare(request, runs=False)
        except ContextLengthExceeded as error:
            if error.is_least:
                raise
            return error.num_prompt_tokens
        return len(prepared.prompt.token_ids)

    async def status(self) -> EngineStatus:
        """Describe what the engine does now, without waiting for a long step. Raises EngineDead."""
        moment = await self._monitor.moment()
        replies = [*self._running_replies(), *self._preparing_replies()]
        return engine_status(moment, replies, self.queue.num_refused)

    async def metrics(self) -> Iterable[Metric]:
        """Return the figures in Prometheus' form. Raises EngineDead."""
        return metric_families(await self._monitor.moment())

    def cancel(self, request_id: str, *, salts: str = "") -> bool:
        """End a request, or one of its replies, with Cancelled.

        Returns False if no running request has this id and a salt that begins with `salts`.
        """
        was_preparing = [front.preparations.cancel(request_id, salts=salts) for front in self.fronts]
        was_running = [
            generation.cancel(request_id)
            for generation in self._open_generations()
            if generation.request.cache_salt.startswith(salts)
        ]
        return any((*was_preparing, *was_running))

    async def disk_entries(self) -> list[Entry]:
        """Describe what is kept on disk; times are seconds since the epoch. Raises EngineDead."""
        return await self.ask(lambda engine: engine.disk_entries())

    async def cache_entries(self) -> list[Entry]:
        """Return the nodes of the prefix cache's tree. Raises EngineDead."""
        return await self.ask(lambda engine: engine.cache_entries())

    async def clear_cache(self, *, salts: str = "") -> int:
        """Remove the unpinned cached state of salts that begin with `salts`. Returns the bytes freed.

        Their prompts and replies are not kept for the next start either. Raises EngineDead.
        """
        self.memories.clear(salts)
        return await self.ask(lambda engine: engine.clear_cache(salts))

    def state_of(self, model: int) -> State:
        """Return the place of the weights of the model at this position."""
        return self._residents[model].state

    async def load_model(self, model: int, *, wait: bool) -> None:
        """Begin to load the weights unless they are in memory, and `wait` until they are, or cannot be loaded.

        Raises ModelUnavailable if a load failed, Overloaded if it was given up or at shutdown, and EngineDead.
        """
        await self.ask(lambda engine: engine.load(engine.models[model]))
        if wait:
            await self._leaves(model, "loading")
        if (refusal := self._residents[model].refusal(time.monotonic())) is not None:
            raise refusal
        if wait and self.state_of(model) == "unloaded":
            raise Overloaded("The model was unloaded again, by a command or for another one.", retry_after_s=_LOOK_S)

    async def unload_model(self, model: int, *, wait: bool) -> None:
        """Let the weights leave memory, and `wait` until they have. Raises ModelBusy while requests use them."""
        self._check_unused(model)
        await self.ask(lambda engine: engine.unload(engine.models[model]))
        if wait:
            await self._leaves(model, "leaving")
            if self.state_of(model) == "ready":  # they stay for what came meanwhile
                self._check_unused(model)

    def _check_unused(self, model: int) -> None:
        if users := self._users(model, [*self._running_replies(), *self._preparing_replies()]):
            raise ModelBusy(f"The model is in use by {users}. Wait for the end, or cancel it.")

    async def _leaves(self, model: int, state: State) -> None:
        """Wait until a model is in another state. Raises as `submit` does if the engine changes no state any more."""
        while self.state_of(model) == state:
            self._check_open()
            await asyncio.sleep(_LOOK_S)

    async def shutdown(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, then fail the others and end the thread.

        A second call hurries: less is written to disk.
        """
        save_s = _HURRIED_SAVE_S if self._is_closing else _SAVE_S
        self._is_closing = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while self.generations and not self.is_dead and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._fail_all(ShuttingDown())
        for front in self.fronts:
            await front.keeper.finish(_TRIM_S)  # before what its replies leave is written to disk
        await asyncio.to_thread(self._thread.stop, _STOP_S, save_s)
        self._awake.close()
        self.pool.shutdown()
        await asyncio.gather(*(front.preparations.close() for front in self.fronts))
        await asyncio.to_thread(self.memories.close)

    def fail(self, error: EngineDead) -> None:
        """End all requests with this error, from any thread, though the engine thread may never come back."""
        self._thread.fail(error)

    async def ask(self, question: Callable[["LLMEngine"], T]) -> T:
        """Ask the engine between two steps. Raises EngineDead."""
        return await asyncio.wrap_future(self._thread.inspect(question))

    def _check_open(self) -> None:
        self._thread.check_alive()
        if (hanging := self._monitor.hanging()) is not None:
            raise Overloaded(hanging, retry_after_s=_HANGING_RETRY_S)
        if self._is_closing:
            raise ShuttingDown()

    # -- the life of a request

    def _replies(self, prepared: PreparedRequest, progress: Iterable[ReplyStats]) -> Iterator[Reply]:
        front, expectation = self.fronts[prepared.request.model], Expectation()
        if prepared.compared is not None and front.model_facts["prefix_cache"]:
            expectation = prepared.compared.expectation
        rules = () if prepared.chat is None else prepared.chat.rules
        for index, stats in enumerate(progress):
            seq = prepared.sequence(next(self._seq_ids), index)
            seq.model = prepared.request.model
            stats.queue(seq, expectation, rules, time.monotonic())
            yield Reply(index, seq, front.processor.output(prepared), stats)

    def _open_generations(self) -> list[Generation]:
        return list(dict.fromkeys(self.generations.values()))

    def _running_replies(self) -> list[ReplyStats]:
        return [reply for generation in self._open_generations() for reply in generation.replies]

    def _preparing_replies(self) -> list[ReplyStats]:
        return [reply for front in self.fronts for reply in front.preparations.replies]

    def _users(self, model: int, replies: Iterable[ReplyStats]) -> str:
        """Name the first requests for a model."""
        running = [reply.request_id for reply in replies if reply.model == model]
        return ", ".join(running[:_MOST_SHOWN]) + (", …" if len(running) > _MOST_SHOWN else "")

    def _in_the_way(self, model: int) -> str | None:
        """Name the models in memory and what they run, if requests for another one wait for that memory."""
        if not (self._residents[model].is_short or self._residents[model].is_yielding):
            return None
        running = [reply for reply in self._running_replies() if reply.phase != "queued"]
        return "; ".join(
            f"{front.name}, which runs {self._users(at, running) or 'nothing'}"
            for at, front in enumerate(self.fronts)
            if self._residents[at].takes_memory
        )

    def _forget(self, generation: Generation) -> None:
        for seq_id in generation.seq_ids:
            self.generations.pop(seq_id, None)
        if not self.generations:
            self._awake.release()
        self.queue.left(generation)
        self._monitor.totals[generation.request.model].end(generation.all_replies)

    # -- called on the engine thread

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        self._call(self._dispatch, updates)

    def _engine_died(self, error: EngineDead) -> None:
        self._call(self._fail_all, error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed, so no caller waits for updates
            logger.debug("An update came after the event loop was closed")

    # -- called on the event loop

    def _dispatch(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            generation = self.generations.get(update.seq_id)
            if generation is not None:
                stats = generation.stats(update.seq_id)
                self._monitor.totals[stats.model].take(stats, update, time.monotonic())
                generation.put(update)

    def _fail_all(self, error: VLLMMLXError) -> None:
        for front in self.fronts:
            front.keeper.close()
        for generation in self._open_generations():
            generation.put(error)


class Monitor:
    """Watches the engine thread and the prompt threads, and asks the engine for its report.

    All callers of one moment share one report, which costs the engine thread little. Belongs to one event loop.
    """

    def __init__(self, config: EngineConfig, fronts: Items[Front], thread: "EngineThread", pool: PromptPool):
        started_s, stall_s = time.monotonic(), config.stall_ms / 1000
        self._whole = Totals(started_s=started_s, stall_threshold_s=stall_s)
        others = (Totals(started_s=started_s, stall_threshold_s=stall_s, of_all=self._whole) for _ in fronts)
        self.totals = tuple(others) if len(fronts) > 1 else (self._whole,)
        self._fronts = fronts
        self._thread = thread
        self._pool = pool
        self._watchdog_s = config.watchdog_s
        self._logged_s: float | None = None  # start of the hanging step that was logged
        self._pending: asyncio.Future[EngineReport] | None = None
        self._last: EngineReport | None = None
        self._last_s = 0.0

    def error(self) -> str | None:
        """Return the reason why no request can be served; None if the engine is well."""
        return self.hanging() if self._thread.error is None else self._thread.error.message

    def hanging(self) -> str | None:
        """Describe the part that hangs: the engine in a step, or many prompt threads. None if nothing hangs."""
        return self._hanging_step() or self._pool.error()

    def _hanging_step(self) -> str | None:
        """Return the reason why the engine hangs, or None. The first call during a hanging step logs the stack."""
        started_s = self._thread.step_started_s
        if started_s is None or time.monotonic() - started_s < self._watchdog_s:
            return None
        stack = stack_of(self._thread.ident)
        if self._logged_s != started_s:
            self._logged_s = started_s
            logger.error("The engine hangs in a step:\n%s", "".join(stack.format()))
        return f"The engine has been in one step for {time.monotonic() - started_s:.0f} s{place_in(stack)}."

    async def moment(self) -> Moment:
        """Return all figures of this moment, with the previous report while a long step runs. Raises EngineDead."""
        self._thread.check_alive()
        pending = self._ask()
        await asyncio.wait({pending}, timeout=None if self._last is None else _PATIENCE_S)
        if pending.done():
            report, age_s = pending.result(), 0.0
        else:
            assert self._last is not None, "the first report is always awaited"
            report, age_s = self._last, time.monotonic() - self._last_s
        return Moment(
            fronts=self._fronts,
            report=report,
            report_age_s=age_s,
            totals=self._whole,
            totals_of_models=self.totals,
            now=time.monotonic(),
        )

    def _ask(self) -> asyncio.Future[EngineReport]:
        loop = asyncio.get_running_loop()
        if self._pending is None or self._pending.done() or self._pending.get_loop() is not loop:
            self._pending = asyncio.wrap_future(self._thread.inspect(lambda engine: engine.report()), loop=loop)
            self._pending.add_done_callback(self._answered)
        return self._pending

    def _answered(self, pending: asyncio.Future[EngineReport]) -> None:
        if not pending.cancelled() and pending.exception() is None:
            self._last, self._last_s = pending.result(), time.monotonic()
