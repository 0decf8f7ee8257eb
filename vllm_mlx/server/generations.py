"""The generations of a request that carries several prompts, as one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

from ..core.events import GenerationEvent
from ..core.prompt_change import PromptChange
from ..core.request import Request
from .interfaces import Engine, Generation

MAX_BUFFERED_EVENTS = 64  # a client that reads slowly must hold up the readers, so that the engine joins deltas


async def submit_all(engine: Engine, requests: Sequence[Request]) -> Generation:
    """Raises what `submit` raises for any of them; none of the others is left running then."""
    if len(requests) == 1:
        return await engine.submit(requests[0])
    async with AsyncExitStack() as stack:
        generations = []
        for request in requests:
            generation = await engine.submit(request)
            await stack.enter_async_context(generation)
            generations.append(generation)
        return PromptBatch(generations, requests[0].sampling.n, stack.pop_all())
    raise AssertionError("an exit stack without callbacks suppresses nothing")


class PromptBatch:
    """Choices are numbered prompt by prompt. Events come as they come, in order within a choice."""

    def __init__(self, generations: Sequence[Generation], choices_per_prompt: int, stack: AsyncExitStack) -> None:
        self._generations = generations
        self._choices_per_prompt = choices_per_prompt
        self._stack = stack
        self._events: asyncio.Queue[tuple[int, GenerationEvent] | None] = asyncio.Queue(MAX_BUFFERED_EVENTS)
        self._readers: list[asyncio.Task[None]] = []

    @property
    def num_prompt_tokens(self) -> int:
        return sum(generation.num_prompt_tokens for generation in self._generations)

    @property
    def prompt_change(self) -> PromptChange | None:
        """Texts to complete belong to no conversation."""
        return None

    async def __aenter__(self) -> "PromptBatch":
        self._readers = [
            asyncio.create_task(self._read(number * self._choices_per_prompt, generation))
            for number, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self._readers:
            reader.cancel()
        try:
            await asyncio.gather(*self._readers, return_exceptions=True)
        finally:
            await self._stack.aclose()

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
