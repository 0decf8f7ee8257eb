"""Several prompts of one request as one generation."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

from ..core.events import GenerationEvent
from ..core.receipt import PromptChange
from ..engine.generation import Generation
from .searching import SearchingReply

MAX_BUFFERED_EVENTS = 64  # a slow client must block the readers, so that the engine joins deltas


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


RequestGeneration: TypeAlias = Generation | PromptBatch | SearchingReply
