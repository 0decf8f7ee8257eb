"""The engine as the event loop sees it: requests in, streams of events out. Words meet ids here; no mlx."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ..core.config import EngineConfig, ModelInfo
from ..core.errors import EngineDead, Overloaded, VLLMMLXError
from ..core.memory import MemoryBudget
from ..core.request import Request
from ..core.sequence import Sequence
from ..core.step import SequenceUpdate
from ..processing.processor import Prepared, Processor
from ..processing.tokenizer import Tokenizer
from ..runner.loader import Checkpoint, find_checkpoint
from .engine import Engine
from .generation import Choice, Generation
from .thread import EngineThread

logger = logging.getLogger(__name__)

_STOP_S = 10.0  # a step that is under way may finish
_TOKENIZER_THREADS = 2  # long prompts are rendered and tokenised off the event loop


class AsyncEngine:
    """Everything but `start` is called on one event loop."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        """Loads everything, here and on the engine thread; returns when requests can come. Raises ConfigError."""
        tokenizer = Tokenizer.load(
            checkpoint.path, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template
        )
        self._thread = EngineThread(lambda: Engine.load(config, checkpoint), self._deliver, self._engine_died)
        self.facts = self._thread.start()
        self._processor = Processor(
            tokenizer,
            config,
            checkpoint.path,
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
        )
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="prompt")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generations: dict[int, Generation] = {}  # by sequence id
        self._seq_ids = itertools.count()
        self._closing = False

    @classmethod
    def start(cls, config: EngineConfig) -> "AsyncEngine":
        """Find the checkpoint, downloading it if need be, and load it. Raises ConfigError."""
        return cls(config, find_checkpoint(config.model, config.revision))

    @property
    def info(self) -> ModelInfo:
        return self.facts.info

    @property
    def memory(self) -> MemoryBudget:
        return self.facts.memory

    @property
    def token_names(self) -> Tokenizer:
        return self._processor.tokenizer

    @property
    def is_healthy(self) -> bool:
        return self._thread.error is None

    def error(self) -> str | None:
        return None if self._thread.error is None else self._thread.error.message

    async def submit(self, request: Request) -> Generation:
        """Render, check and queue a request.

        Raises RequestError before anything is generated, EngineDead if nothing can be, Overloaded while closing.
        """
        self._check_open()
        self._loop = asyncio.get_running_loop()
        prepared = await self._loop.run_in_executor(self._pool, self._processor.prepare, request)
        self._check_open()
        seqs = [self._sequence(prepared, index) for index in range(request.sampling.n)]
        num_prompt_tokens = len(prepared.prompt.token_ids)
        choices = {
            seq.seq_id: Choice(index, num_prompt_tokens, self._processor.output(prepared))
            for index, seq in enumerate(seqs)
        }
        generation = Generation(
            request.request_id, num_prompt_tokens, choices, abort=self._thread.abort, closed=self._forget
        )
        for seq in seqs:
            self._generations[seq.seq_id] = generation
        self._thread.add(seqs)
        return generation

    async def shutdown(self, drain_s: float) -> None:
        """Refuse new requests, give running ones `drain_s` to finish, then fail what is left and end the thread."""
        self._closing = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._generations and self.is_healthy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._fail_all(EngineDead("The server is shutting down."))
        await asyncio.to_thread(self._thread.stop, _STOP_S)
        self._pool.shutdown(wait=False)

    async def num_rows(self) -> int:
        """Rows that hold state on the device right now."""
        return await asyncio.wrap_future(self._thread.inspect(lambda engine: engine.num_rows))

    def _check_open(self) -> None:
        if self._thread.error is not None:
            raise self._thread.error
        if self._closing:
            raise Overloaded("The server is shutting down.", retry_after_s=5)

    def _sequence(self, prepared: Prepared, index: int) -> Sequence:
        sampling = prepared.sampling
        return Sequence(
            seq_id=next(self._seq_ids),
            prompt=prepared.prompt,
            sampling=replace(sampling.tokens, seed=(sampling.tokens.seed + index) % 2**64),
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            cache_salt=prepared.request.cache_salt,
        )

    def _forget(self, generation: Generation) -> None:
        for seq_id in generation.seq_ids:
            self._generations.pop(seq_id, None)

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
                generation.put(update)

    def _fail_all(self, error: VLLMMLXError) -> None:
        for generation in set(self._generations.values()):
            generation.put(error)
