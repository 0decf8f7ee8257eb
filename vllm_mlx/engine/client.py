"""The engine as the event loop uses it: requests in, streams of events out. It calls no mlx.

A request is prepared. Then updates of its sequences come in, and generation events go out.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

from prometheus_client.core import Metric

from ..cache.stats import Entry
from ..core.config import EngineConfig
from ..core.errors import (
    Cancelled,
    ContextLengthExceeded,
    EngineDead,
    ModelBusy,
    Overloaded,
    ShuttingDown,
    VLLMMLXError,
    setting,
)
from ..core.events import Counted, Failed, Finished, FinishReason, GenerationEvent, PromptProgress, Started, Usage
from ..core.receipt import Expectation
from ..core.request import ROW_IDS, Request
from ..core.sequence import Sequence
from ..core.step import SequenceUpdate
from ..disk.kept import Memories
from ..formats.pipeline import OutputPipeline
from ..formats.reply import FinishedReply
from ..formats.vectors import VectorOutput
from ..prompt.processor import PreparedRequest, RequestProcessor
from ..scheduler.residence import State
from ..util.fair_queue import FairThreads
from ..util.fence import clear_locals
from ..util.tasks import Deadline
from .admission import AdmissionQueue, users
from .engine import EngineThread, LLMEngine
from .front import Front
from .macos import KeepAwake
from .monitoring.counters import OUTCOMES, ReplyStats
from .monitoring.monitor import Monitor
from .monitoring.prometheus import metric_families
from .monitoring.schema import EngineStatus, ModelFacts
from .monitoring.status import engine_status
from .preparing import PromptPool, is_long

logger = logging.getLogger(__name__)
T = TypeVar("T")

_HANGING_RETRY_S = 10.0  # a step that hangs may still end
_TRIM_S = 2.0  # time to trim the replies that ended last to the part that the next turn can contain
_STOP_S = 10.0  # time for the running step to finish
_SAVE_S = 20.0  # time to write state that is not on disk yet
_HURRIED_SAVE_S = 1.0
_LOOK_S = 0.02  # between two looks at a model that comes or leaves
Parts = tuple[EngineThread, PromptPool, FairThreads]  # the threads of the engine, of prompts and of images
IndexedEvent = tuple[int, GenerationEvent]


class Preparations:
    """All requests that are being prepared. Belongs to one event loop."""

    def __init__(self, fronts: Items[Front], pool: PromptPool):
        self._fronts = fronts
        self._pool = pool
        self._open: list[_Preparation] = []

    @property
    def replies(self) -> list[ReplyStats]:
        """Return the progress of the replies whose prompts are being prepared."""
        return [reply for preparation in self._open for reply in preparation.replies]

    async def prepare(self, request: Request, *, runs: bool = True) -> tuple[PreparedRequest, list[ReplyStats]]:
        """Prepare a prompt. If the caller leaves, the work ends at its next check of the deadline.

        With `runs` False, it is only counted. Also returns the progress of each reply to the request. Raises
        RequestError, and Cancelled after `cancel`.
        """
        limit_s = self._fronts[request.model].config.max_prepare_s
        deadline = Deadline(
            limit_s,
            f"This request took more than {limit_s:g} seconds to prepare ({setting('max_prepare_s')}). "
            "Send a shorter one, or try again when the server is less busy.",
        )
        preparation = _Preparation(request, ReplyStats.of(request, time.monotonic()), asyncio.current_task())
        self._open.append(preparation)
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await self._prepare(request, deadline, runs), preparation.replies
        except TimeoutError:
            deadline.check()
            raise
        except asyncio.CancelledError:
            if preparation.is_cancelled and preparation.task is not None and not preparation.task.uncancel():
                raise Cancelled() from None
            raise
        finally:
            self._open.remove(preparation)
            deadline.cancel()

    def cancel(self, request_id: str, *, salts: str = "") -> bool:
        """End the preparation of a request with Cancelled.

        Returns False if no request that is prepared has this id and a salt that begins with `salts`.
        """
        found = [preparation for preparation in self._open if preparation.matches(request_id, salts)]
        for preparation in found:
            preparation.cancel()
        return bool(found)

    async def _prepare(self, request: Request, deadline: Deadline, runs: bool = True) -> PreparedRequest:
        """Prepare on a prompt thread, with the media first. Media that the model does not take is never fetched."""
        front, rendered = self._fronts[request.model], None
        try:
            front.processor.media_of(request)  # before a document is read
            request = await front.media.read_documents(request, deadline=deadline)
            if parts := front.processor.media_of(request):
                rendered = await front.media.render(
                    parts, salt=request.cache_salt, tenant=request.tenant, deadline=deadline
                )
            args = request, rendered, deadline, runs
            return await self._pool.run(
                front.processor.prepare, *args, tenant=request.tenant, deadline=deadline, is_long=is_long(request)
            )
        except BaseException as error:
            clear_locals(error)  # so that a handler that keeps the error keeps no pixels, arrays or texts
            raise


@dataclass(eq=False, slots=True)
class _Preparation:
    """One request that a task prepares."""

    request: Request
    replies: list[ReplyStats]
    task: "asyncio.Task[object] | None"
    is_cancelled: bool = False

    def matches(self, request_id: str, salts: str) -> bool:
        ids = [self.request.request_id, *(reply.request_id for reply in self.replies)]
        return self.request.cache_salt.startswith(salts) and request_id in ids

    def cancel(self) -> None:
        if self.task is not None and not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()


class Reply:
    """One of the n replies to a request."""

    def __init__(self, index: int, seq: Sequence, output: OutputPipeline | VectorOutput, stats: ReplyStats):
        self.index = index
        self.seq = seq
        self.stats = stats
        self._output = output
        self._num_cached_tokens: int | None = None  # None until the sequence has been scheduled
        self._predicted = (0, 0)  # tokens of the prediction that were accepted, and rejected

    @property
    def is_open(self) -> bool:
        return self.stats.outcome is None

    def take(self, update: SequenceUpdate) -> list[GenerationEvent]:
        """Turn an update into events. A reply that a stop string or its last tool call ends is closed here."""
        if update.error is not None:
            return self.fail(update.error)
        events: list[GenerationEvent] = []
        self._predicted = (update.num_predicted, update.num_mispredicted)
        num_prompt_tokens = self.seq.num_prompt_tokens
        if self._num_cached_tokens is None:
            self._num_cached_tokens = update.receipt.cached_tokens
            events.append(Started(num_prompt_tokens, self._num_cached_tokens, self.stats.receipt, self.stats))
        if update.tokens:
            deltas = self._output.feed(update.tokens)
            counted = [Counted(self._used(self._output.usage(self._num_cached_tokens)))] if self._output.counts else []
            events += [*counted, *deltas]
        elif self._num_cached_tokens < update.num_computed_tokens < num_prompt_tokens:
            events.append(PromptProgress(update.num_computed_tokens, num_prompt_tokens))
        if isinstance(self._output, VectorOutput):
            self._output.vectors = update.vectors
        if self._output.stopped:
            return events + self._finish(FinishReason.STOP, None)
        if update.finish_reason is not None:
            return events + self._finish(update.finish_reason, update.stop_token_id)
        return events

    async def take_scores(self, update: SequenceUpdate) -> None:
        """Take the log-probabilities of the prompt, on a thread, since those of a long prompt take long."""
        await asyncio.to_thread(self._output.feed_prompt, update.prompt_logprobs)

    @property
    def finished(self) -> FinishedReply:
        """The reply so far, or the complete reply once it has ended."""
        return self._output.reply

    def _finish(self, reason: FinishReason, stop_token_id: int | None) -> list[GenerationEvent]:
        events = self._output.finish(reason, stop_token_id, cached_tokens=self._num_cached_tokens or 0)
        *deltas, finished = events
        assert isinstance(finished, Finished), "a reply ends with it"
        if self._output.is_silent:
            num_tokens, limit = finished.usage.completion_tokens, setting("max_silent_tokens")
            logger.info("id=%s ends after %d tokens without an answer (%s)", self.stats.request_id, num_tokens, limit)
        self.stats.end(OUTCOMES[finished.reason], time.monotonic())
        return [*deltas, replace(finished, usage=self._used(finished.usage))]

    def _used(self, usage: Usage) -> Usage:
        """Add the receipt, and the tokens of the prediction."""
        usage = replace(usage, receipt=self.stats.receipt)
        if usage.accepted_prediction_tokens is not None:
            accepted, rejected = self._predicted
            accepted = min(accepted, usage.completion_tokens)  # a stop string may cut some of them off
            usage = replace(usage, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)
        return usage

    def fail(self, error: VLLMMLXError) -> list[GenerationEvent]:
        self.stats.end("cancelled" if isinstance(error, Cancelled) else "failed", time.monotonic())
        return [Failed(error)]

    def leave(self) -> None:
        """End the reply because its client has left. What the client received stays."""
        self.stats.end("aborted", time.monotonic())


class Generation:
    """All replies to one request. Leaving the `async with` block aborts the ones that still run."""

    def __init__(self, prepared: PreparedRequest, replies: Mapping[int, Reply], client: "EngineClient"):
        """Hold `replies`, by sequence id."""
        self.request = prepared.request
        self._prepared = prepared
        self._client = client
        self._keeper = client.fronts[self.request.model].keeper
        self.num_prompt_tokens = prepared.prompt.num_tokens
        self.prompt_change = None if prepared.compared is None else prepared.compared.change
        self.by_sequence = replies
        self._updates: list[SequenceUpdate | VLLMMLXError] = []
        self._wake = asyncio.Event()

    @property
    def replies(self) -> list[ReplyStats]:
        """Return the progress of the replies that have not ended."""
        return [reply.stats for reply in self.by_sequence.values() if reply.is_open]

    @property
    def all_replies(self) -> list[ReplyStats]:
        return [reply.stats for reply in self.by_sequence.values()]

    def cancel(self, request_id: str) -> bool:
        """End all replies, or the one with this id, with Cancelled. Returns False if none of them runs."""
        names = {
            seq_id: (self.request.request_id, reply.stats.request_id) for seq_id, reply in self.by_sequence.items()
        }
        ending = [seq_id for seq_id in names if self.by_sequence[seq_id].is_open and request_id in names[seq_id]]
        self._client.abort(ending)
        for seq_id in ending:
            self.put(SequenceUpdate(seq_id=seq_id, error=Cancelled()))
        return bool(ending)

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reply in self._end_open_replies():
            reply.leave()
            self._keeper.take(self._prepared, reply.seq, reply.finished, is_last=False)
        self._client.leave(self)

    async def __aiter__(self) -> AsyncIterator[IndexedEvent]:
        """Yield (index of the reply, event) until every reply has sent Finished or Failed.

        Updates that arrive while the consumer is busy are joined, so a slow reader gets fewer, longer deltas.
        """
        while any(reply.is_open for reply in self.by_sequence.values()):
            await self._wake.wait()
            self._wake.clear()
            updates, self._updates = self._updates, []
            for item in updates if len(updates) == 1 else _join(updates):
                if isinstance(item, SequenceUpdate) and item.prompt_logprobs:
                    await self.by_sequence[item.seq_id].take_scores(item)
                for event in self._events(item):
                    yield event

    def put(self, item: SequenceUpdate | VLLMMLXError) -> None:
        """Add an update of one sequence, or an error that ends all of them. Called on the event loop."""
        self._updates.append(item)
        self._wake.set()

    def _end_open_replies(self) -> list[Reply]:
        """Abort the sequences of the replies that still run, and return these replies."""
        left = [reply for reply in self.by_sequence.values() if reply.is_open]
        self._client.abort([reply.seq.seq_id for reply in left])
        return left

    def _events(self, item: SequenceUpdate | VLLMMLXError) -> list[IndexedEvent]:
        if isinstance(item, VLLMMLXError):
            return [event for reply in self._end_open_replies() for event in self._taken(reply, reply.fail(item))]
        reply = self.by_sequence[item.seq_id]
        if not reply.is_open:
            return []
        events = self._taken(reply, reply.take(item))
        if events and isinstance(events[-1][1], Finished) and item.finish_reason is None:
            self._client.abort([item.seq_id])  # its text ended it, which the engine cannot know
        return events

    def _taken(self, reply: Reply, events: list[GenerationEvent]) -> list[IndexedEvent]:
        """Return the events with the index of their reply. A reply that has ended is kept before they are sent."""
        if not reply.is_open:
            self._keeper.take(self._prepared, reply.seq, reply.finished, is_last=reply.stats.outcome == "stop")
        return [(reply.index, event) for event in events]


def _join(updates: list[SequenceUpdate | VLLMMLXError]) -> list[SequenceUpdate | VLLMMLXError]:
    """Join the updates of each sequence, in the order of their first updates; errors come last."""
    gathered: dict[int, list[SequenceUpdate]] = {}
    errors: list[VLLMMLXError] = []
    for item in updates:
        if isinstance(item, VLLMMLXError):
            errors.append(item)
        else:
            gathered.setdefault(item.seq_id, []).append(item)
    return [*map(SequenceUpdate.joined, gathered.values()), *errors]


class EngineClient:
    """Serves requests. All methods are called on one event loop, except the callbacks of the engine thread."""

    def __init__(self, config: EngineConfig, fronts: list[Front], memories: Memories, parts: Parts):
        """`parts` are those of the fronts, which are the models by their positions; the first is the default."""
        self.fronts, self.memories, self.parts = fronts, memories, parts
        self._thread, self.pool, _ = thread, pool, _ = parts
        self.preparations = Preparations(fronts, pool)
        self._monitor = Monitor(config, fronts, thread, pool)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awake = KeepAwake(enabled=config.keep_awake)
        self.generations: dict[int, Generation] = {}  # by sequence id
        self._seq_ids = itertools.count(step=ROW_IDS)
        self._is_closing = False
        thread.listen(self._deliver, self._engine_died)
        self._models = thread.models
        self.queue = AdmissionQueue(config, self._running_replies, self._models)
        for model in self._models:  # loads of other models do not count as time without a request
            model.use(time.monotonic())

    def add(self, front: Front) -> None:
        """Serve a model that the engine has got."""
        self.fronts.append(front)
        self._monitor.add()

    @property
    def processor(self) -> RequestProcessor:
        return self.fronts[0].processor

    @property
    def model_facts(self) -> ModelFacts:
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
        """Render, check and queue a request. The caller must enter the generation immediately; leaving it ends it.

        Raises RequestError before anything is generated, EngineDead if nothing can be generated, and Overloaded while
        the server shuts down or if the queue is full.
        """
        self._check_open()
        self._models[request.model].use(time.monotonic())
        self._loop = asyncio.get_running_loop()
        async with self.queue.preparing(request, request.sampling.n):
            prepared, progress = await self.preparations.prepare(request)
        self._check_open()
        replies = {reply.seq.seq_id: reply for reply in self._replies(prepared, progress)}
        generation = Generation(prepared, replies, self)
        self.queue.watch(generation)
        self._awake.hold()
        self.generations |= dict.fromkeys(generation.by_sequence, generation)
        self._thread.tell(LLMEngine.add, [reply.seq for reply in replies.values()])
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
                prepared, _ = await self.preparations.prepare(request, runs=False)
        except ContextLengthExceeded as error:
            if error.is_least:
                raise
            return error.num_prompt_tokens
        return prepared.prompt.num_tokens

    async def status(self) -> EngineStatus:
        """Describe the engine's present work, without waiting for a long step. Raises EngineDead."""
        moment = await self._monitor.moment()
        replies = [*self._running_replies(), *self.preparations.replies]
        return engine_status(moment, replies, self.queue.num_refused)

    async def metrics(self) -> Iterable[Metric]:
        """Return the figures in Prometheus' form. Raises EngineDead."""
        return metric_families(await self._monitor.moment())

    def cancel(self, request_id: str, *, salts: str = "") -> bool:
        """End a request, or one of its replies, with Cancelled.

        Returns False if no running request has this id and a salt that begins with `salts`.
        """
        was_preparing = self.preparations.cancel(request_id, salts=salts)
        was_running = [
            generation.cancel(request_id)
            for generation in self._open_generations()
            if generation.request.cache_salt.startswith(salts)
        ]
        return any((was_preparing, *was_running))

    async def disk_entries(self) -> list[Entry]:
        """Describe the cache on disk; times are seconds since the epoch. Raises EngineDead."""
        return await self.ask(LLMEngine.disk_entries)

    async def cache_entries(self) -> list[Entry]:
        """Return the nodes of the prefix cache's tree. Raises EngineDead."""
        return await self.ask(LLMEngine.cache_entries)

    async def clear_cache(self, *, salts: str = "") -> int:
        """Remove the unpinned cached state of salts that begin with `salts`. Returns the bytes freed.

        Their prompts and replies are not kept for the next start either. Raises EngineDead.
        """
        self.memories.clear(salts)
        return await self.ask(lambda engine: engine.clear_cache(salts))

    def state_of(self, model: int) -> State:
        """Return the place of the weights of the model at this position."""
        return self._models[model].state

    async def load_model(self, model: int, *, wait: bool) -> None:
        """Begin to load the weights unless they are in memory, and `wait` until they are, or cannot be loaded.

        Raises ModelUnavailable if a load failed, Overloaded if it was abandoned or at shutdown, and EngineDead.
        """
        await self.ask(lambda engine: engine.load(engine.models[model]))
        if wait:
            await self._leaves(model, "loading")
        if (refusal := self._models[model].refusal(time.monotonic())) is not None:
            raise refusal
        if wait and self.state_of(model) == "unloaded":
            raise Overloaded("The model was unloaded again, by a command or for another one.", retry_after_s=_LOOK_S)

    async def unload_model(self, model: int, *, wait: bool) -> None:
        """Let the weights leave memory, and `wait` until they have. Raises ModelBusy while requests use them."""
        self._check_unused(model)
        await self.ask(lambda engine: engine.unload(engine.models[model]))
        if wait:
            await self._leaves(model, "leaving")
            if self.state_of(model) == "ready":  # they stay for requests that came meanwhile
                self._check_unused(model)

    def _check_unused(self, model: int) -> None:
        if names := users(model, [*self._running_replies(), *self.preparations.replies]):
            raise ModelBusy(f"The model is in use by {names}. Wait for the end, or cancel it.")

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
            await front.keeper.finish(_TRIM_S)  # before the state of its replies is written to disk
        await asyncio.to_thread(self._thread.stop, _STOP_S, save_s)
        self._awake.close()
        self.pool.shutdown()
        await asyncio.gather(*(front.media.close() for front in self.fronts))
        await asyncio.to_thread(self.memories.close)

    def fail(self, error: EngineDead) -> None:
        """End all requests with this error, from any thread, though the engine thread may never come back."""
        self._thread.fail(error)

    async def ask(self, question: Callable[[LLMEngine], T]) -> T:
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

    def abort(self, seq_ids: Items[int]) -> None:
        """End sequences before the next step."""
        self._thread.tell(LLMEngine.abort, seq_ids)

    def leave(self, generation: Generation) -> None:
        """Forget a request, whose replies have ended."""
        for seq_id in generation.by_sequence:
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
                stats = generation.by_sequence[update.seq_id].stats
                self._monitor.totals[stats.model].take(stats, update, time.monotonic())
                generation.put(update)

    def _fail_all(self, error: VLLMMLXError) -> None:
        for front in self.fronts:
            front.keeper.close()
        for generation in self._open_generations():
            generation.put(error)
