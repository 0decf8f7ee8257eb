"""The interface of an engine that the server needs, and several prompts as one generation.

`engine.client.EngineClient` implements the interface.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from prometheus_client.core import Metric

from ..api.replies import TokenNames
from ..cache.stats import Entry
from ..core.config import ModelInfo
from ..core.events import GenerationEvent
from ..core.receipt import PromptChange
from ..core.request import Request
from ..engine.monitoring.schema import EngineStatus

MAX_BUFFERED_EVENTS = 64  # a slow client must block the readers, so that the engine joins deltas


class Generation(Protocol):
    """All choices of one request. Leaving the block aborts what still runs.

    Iterating gives (choice index, event) and ends after every choice has sent Finished or Failed.
    """

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def prompt_change(self) -> PromptChange | None:
        """Why the prompt does not continue the previous one of its conversation, if that is known."""
        ...

    async def __aenter__(self) -> "Generation": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]: ...


class Engine(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def token_names(self) -> TokenNames: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def is_dead(self) -> bool:
        """Whether the engine has ended for good: the process must be restarted."""
        ...

    def error(self) -> str | None: ...

    async def submit(self, request: Request) -> Generation:
        """Raises RequestError before anything is generated, EngineDead if nothing can be.

        The caller must enter the generation at once, because leaving it is what ends it. Cancelling ends the request.
        """
        ...

    async def count_tokens(self, request: Request) -> int:
        """Count the tokens of the prompt that `submit` would run, even if it is too long. Raises RequestError."""
        ...

    async def status(self) -> EngineStatus:
        """The present state and figures. Raises EngineDead."""
        ...

    async def metrics(self) -> Iterable[Metric]:
        """The figures as Prometheus metrics. Raises EngineDead."""
        ...

    def cancel(self, request_id: str, *, salts: str = "") -> bool:
        """End a running request with Cancelled. False if none has this id and a salt that starts with `salts`."""
        ...

    async def cache_entries(self) -> Sequence[Entry]:
        """The nodes of the prefix cache's tree. Raises EngineDead."""
        ...

    async def clear_cache(self, *, salts: str = "") -> int:
        """Forget cached state of salts that start with `salts`. Returns the bytes freed. Raises EngineDead."""
        ...

    async def shutdown(self, drain_s: float) -> None:
        """Let running requests finish for `drain_s` seconds, then end them. Every generation gets its last event."""
        ...


class PromptBatch:
    """The entered generations of a request with several prompts, as one.

    Choices are numbered prompt by prompt. Events are in order within a choice.
    """

    prompt_change: PromptChange | None = None  # texts to complete belong to no conversation

    def __init__(self, generations: Sequence[Generation], choices_per_prompt: int) -> None:
        self._generations = generations
        self._choices_per_prompt = choices_per_prompt
        self._events: asyncio.Queue[tuple[int, GenerationEvent] | None] = asyncio.Queue(MAX_BUFFERED_EVENTS)
        self._readers: list[asyncio.Task[None]] = []

    @property
    def num_prompt_tokens(self) -> int:
        return sum(generation.num_prompt_tokens for generation in self._generations)

    async def __aenter__(self) -> "PromptBatch":
        self._readers = [
            asyncio.create_task(self._read(number * self._choices_per_prompt, generation))
            for number, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        num_running = len(self._readers)
        while num_running:
            item = await self._events.get()
            if item is None:
                num_running -= 1
            else:
                yield item
        await asyncio.gather(*self._readers)

    async def _read(self, first_index: int, generation: Generation) -> None:
        try:
            async for index, event in generation:
                await self._events.put((first_index + index, event))
        finally:
            await self._events.put(None)
