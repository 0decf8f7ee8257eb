"""The engine as the event loop sees it: requests in, streams of events out. Words meet ids here; no mlx."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from ..cache.stats import Entry
from ..core.config import EngineConfig, ModelInfo
from ..core.errors import ContextLengthExceeded, EngineDead, Overloaded, VLLMMLXError
from ..core.memory import MemoryBudget
from ..core.receipt import Expectation
from ..core.request import Request
from ..core.sequence import Sequence
from ..core.step import SequenceUpdate
from ..media.loader import MediaLoader
from ..media.local import MediaRoot
from ..media.vision import VisionProcessor
from ..output.reply import FinishedReply
from ..prompt.processor import PreparedRequest, RequestProcessor
from ..runner.loader import Checkpoint, find_checkpoint
from ..tokens.tokenizer import Tokenizer
from .admission import AdmissionQueue
from .engine import Engine
from .generation import Generation, Reply
from .media_requests import MediaRequests
from .monitoring.counters import ReplyStats, Totals
from .monitoring.facts import build_fields, model_fields
from .monitoring.prometheus import Figures, metric_families
from .monitoring.reports import Reports
from .monitoring.status import status_fields
from .monitoring.watchdog import Watchdog
from .preparing import Preparations
from .prompt_pool import PromptPool
from .thread import EngineThread

logger = logging.getLogger(__name__)

_HANGING_RETRY_S = 10.0  # a step that hangs may still end
_STOP_S = 10.0  # a step that is under way may finish


class EngineClient:
    """Everything but `start` is called on one event loop."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        """Loads everything, here and on the engine thread; returns when requests can come. Raises ConfigError."""
        self._config = config
        media_root = MediaRoot(config.media.media_root)
        tokenizer = Tokenizer.load(
            checkpoint.path, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template
        )
        vision = _vision(config, checkpoint, tokenizer)
        probe = None if vision is None else vision.probe()
        self._thread = EngineThread(lambda: Engine.load(config, checkpoint, probe), self._deliver, self._engine_died)
        self.facts = self._thread.start()
        if vision is not None:
            vision.set_memory(self.memory)
            if self.facts.video_fault is not None:
                vision.refuse_videos(f"one was tried at load: {self.facts.video_fault}")
        self._processor = RequestProcessor(
            tokenizer,
            config,
            checkpoint.path,
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            vision=vision,
        )
        self._pool = PromptPool()
        self._media = None
        if vision is not None:
            media = replace(config.media, media_cache_bytes=self.memory.decoded_bytes)
            loader = MediaLoader(media, media_root, sampling=vision.frame_sampling)
            self._media = MediaRequests(self._processor, vision, loader, self._pool, self._thread.wake)
        self._preparations = Preparations(self._processor, self._media, self._pool, max_prepare_s=config.max_prepare_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generations: dict[int, Generation] = {}  # by sequence id
        self._totals = Totals(started_s=time.monotonic(), stall_threshold_s=config.max_stall_ms / 1000)
        self._reports = Reports(self._thread.inspect)
        self._build = build_fields()
        self._model_facts = model_fields(config, self.facts, self._processor)
        self._watchdog = Watchdog(
            limit_s=config.watchdog_s,
            step_started_s=lambda: self._thread.step_started_s,
            thread_id=lambda: self._thread.ident,
        )
        self._line = AdmissionQueue(config, self._open_generations)
        self._seq_ids = itertools.count()
        self._closing = False

    @classmethod
    def start(cls, config: EngineConfig) -> "EngineClient":
        """Find the checkpoint, downloading it if need be, and load it. Raises ConfigError."""
        return cls(config, find_checkpoint(config.model, config.revision, trust_remote_code=config.trust_remote_code))

    @property
    def info(self) -> ModelInfo:
        return self.facts.info

    @property
    def model_facts(self) -> Mapping[str, Any]:
        """As /v1/status has them."""
        return self._model_facts

    @property
    def memory(self) -> MemoryBudget:
        return self.facts.memory

    @property
    def token_names(self) -> Tokenizer:
        return self._processor.tokenizer

    @property
    def is_healthy(self) -> bool:
        return self.error() is None

    @property
    def is_dead(self) -> bool:
        """For good: the process has to be started anew."""
        return self._thread.error is not None

    def error(self) -> str | None:
        """What keeps requests from being served: the thread has ended, or it or all that prepare prompts hang."""
        return self._hangs() if self._thread.error is None else self._thread.error.message

    async def submit(self, request: Request) -> Generation:
        """Render, check and queue a request. The caller owns the generation: enter it at once, as leaving it ends it.

        Raises RequestError before anything is generated, EngineDead if nothing can be, Overloaded while closing
        and where the line is full.
        """
        self._check_open()
        arrived_s = time.monotonic() if request.arrived_s is None else request.arrived_s
        self._loop = asyncio.get_running_loop()
        async with self._line.preparing(request, request.sampling.n):
            prepared = await self._preparations.prepare(request)
        self._check_open()
        seqs = [self._sequence(prepared, index) for index in range(request.sampling.n)]
        choices = {seq.seq_id: self._choice(prepared, seq, index, arrived_s) for index, seq in enumerate(seqs)}
        generation = Generation(
            request.request_id,
            len(prepared.prompt.token_ids),
            choices,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            prompt_change=None if prepared.compared is None else prepared.compared.change,
            abort=self._thread.abort,
            closed=self._forget,
        )
        self._line.watch(generation)
        self._generations |= dict.fromkeys(generation.seq_ids, generation)
        self._thread.add(seqs)  # from here on it is the caller's: nothing may fail behind this
        return generation

    async def count_tokens(self, request: Request) -> int:
        """Tokens of the prompt that `submit` would run, though it may be too long to run.

        Raises RequestError; ContextLengthExceeded for a prompt that is so long that it is not tokenised.
        """
        try:
            async with self._line.preparing(request, 1):
                prepared = await self._preparations.prepare(request)
        except ContextLengthExceeded as error:
            if error.is_least:
                raise
            return error.num_prompt_tokens
        return len(prepared.prompt.token_ids)

    async def status(self) -> dict[str, Any]:
        """How things stand, in the words of docs/api.md. Does not wait for a long step. Raises EngineDead."""
        self._raise_if_dead()
        report, age_s = await self._reports.latest()
        return status_fields(
            info=self.info,
            build=self._build,
            facts=self._model_facts,
            memory=self.memory,
            report=report,
            report_age_s=age_s,
            totals=self._totals,
            num_refused=self._line.num_refused,
            replies=[
                *(reply for generation in self._open_generations() for reply in generation.replies),
                *self._preparations.replies,
            ],
            now=time.monotonic(),
        )

    async def metrics(self) -> Iterable[Metric]:
        """The same figures, as Prometheus reads them. Raises EngineDead."""
        self._raise_if_dead()
        report, _ = await self._reports.latest()
        return metric_families(
            Figures(
                model=self.info.model,
                build=self._build,
                memory=self.memory,
                report=report,
                totals=self._totals,
                now=time.monotonic(),
            )
        )

    def cancel(self, request_id: str, *, salts: str = "") -> bool:
        """End a request, or one of its replies, with Cancelled. False if none whose salt begins so is under way."""
        own = [each for each in self._open_generations() if each.cache_salt.startswith(salts)]
        is_preparing = self._preparations.cancel(request_id, salts=salts)
        return any(generation.cancel(request_id) for generation in own) or is_preparing

    async def cache_entries(self) -> list[Entry]:
        """The nodes of the prefix cache's tree. Raises EngineDead."""
        self._raise_if_dead()
        return await asyncio.wrap_future(self._thread.inspect(Engine.cache_entries))

    async def clear_cache(self, *, salts: str = "") -> int:
        """Forget all cached state that no restore is using right now; returns the bytes freed. Raises EngineDead.

        `salts`: what the salts of the requests begin with whose state is meant.
        """
        self._raise_if_dead()
        return await asyncio.wrap_future(self._thread.inspect(lambda engine: engine.clear_cache(salts)))

    async def shutdown(self, drain_s: float) -> None:
        """Refuse new requests, give running ones `drain_s` to finish, then fail what is left and end the thread."""
        self._closing = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._generations and not self.is_dead and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._fail_all(EngineDead("The server is shutting down."))
        await asyncio.to_thread(self._thread.stop, _STOP_S)
        self._pool.shutdown()
        if self._media is not None:
            await self._media.close()

    async def num_rows(self) -> int:
        """Rows that hold state on the device right now."""
        return await asyncio.wrap_future(self._thread.inspect(lambda engine: engine.num_rows))

    def _hangs(self) -> str | None:
        return self._watchdog.error() or self._pool.error()

    def _raise_if_dead(self) -> None:
        if self._thread.error is not None:
            raise self._thread.error

    def _check_open(self) -> None:
        self._raise_if_dead()
        if (hangs := self._hangs()) is not None:
            raise Overloaded(hangs, retry_after_s=_HANGING_RETRY_S)
        if self._closing:
            raise Overloaded("The server is shutting down.", retry_after_s=5)

    def _sequence(self, prepared: PreparedRequest, index: int) -> Sequence:
        sampling = prepared.sampling
        return Sequence(
            seq_id=next(self._seq_ids),
            prompt=prepared.prompt,
            sampling=replace(sampling.tokens, seed=(sampling.tokens.seed + index) % 2**64),
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            constraint=prepared.constraint,
            cache_salt=prepared.request.cache_salt,
            tenant=prepared.request.tenant,
            priority=prepared.request.priority,
        )

    def _choice(self, prepared: PreparedRequest, seq: Sequence, index: int, arrived_s: float) -> Reply:
        request_id = prepared.request.request_id
        stats = ReplyStats(
            request_id=request_id if prepared.request.sampling.n == 1 else f"{request_id}-{index}",
            tenant=prepared.request.tenant,
            prompt_tokens=seq.num_prompt_tokens,
            max_tokens=seq.max_tokens,
            arrived_s=arrived_s,
            queued_s=time.monotonic(),
            expectation=self._expectation(prepared),
        )
        return Reply(index, seq, self._processor.output(prepared), stats, partial(self._reply_ended, prepared))

    def _expectation(self, prepared: PreparedRequest) -> Expectation:
        if prepared.compared is None or not self._model_facts["prefix_cache"]:
            return Expectation()
        return prepared.compared.expectation

    def _reply_ended(self, prepared: PreparedRequest, choice: Reply) -> None:
        """Remembers the reply at once, since the next turn may follow at once; what of it stays cached can wait.

        An aborted reply counts as far as it went: clients send back what they received of it.
        """
        if self._closing or self.is_dead:
            return
        reply = choice.reply
        try:
            self._processor.remember(prepared, reply)
        except Exception:  # whatever it is, the reply is whole: the next turn goes without
            logger.exception("A reply could not be remembered")
        if self._config.prefix_cache and reply.token_ids:
            self._pool.submit(self._trim_cache, prepared, choice.seq, reply, tenant=prepared.request.tenant)
        elif self._config.prefix_cache:
            self._thread.keep(choice.seq, choice.seq.num_prompt_tokens)

    def _trim_cache(self, prepared: PreparedRequest, seq: Sequence, reply: FinishedReply) -> None:
        try:
            kept = self._processor.kept_tokens(prepared, reply)
        except Exception:  # whatever it is, all of the reply stays
            logger.exception("What stays cached of a reply could not be told")
            return
        self._thread.keep(seq, max(kept, seq.num_prompt_tokens))

    def _open_generations(self) -> list[Generation]:
        return list(dict.fromkeys(self._generations.values()))

    def _forget(self, generation: Generation) -> None:
        for seq_id in generation.seq_ids:
            self._generations.pop(seq_id, None)
        self._line.left(generation)
        self._totals.requests += 1
        for reply in generation.all_replies:
            self._totals.end(reply)

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
        except RuntimeError:  # the loop is closed: nobody waits for news any more
            logger.debug("News after the event loop was closed")

    # -- called on the event loop

    def _dispatch(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            generation = self._generations.get(update.seq_id)
            if generation is not None:
                self._totals.take(generation.stats(update.seq_id), update, time.monotonic())
                generation.put(update)

    def _fail_all(self, error: VLLMMLXError) -> None:
        for generation in self._open_generations():
            generation.put(error)


def _vision(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> VisionProcessor | None:
    if config.text_only or not checkpoint.has_vision_encoder:
        return None
    return VisionProcessor.load(
        checkpoint.path,
        checkpoint.config,
        tokenizer,
        max_pixels=config.max_pixels,
        trust_remote_code=config.trust_remote_code,
    )
