"""Replies of several generations: those of several prompts together, or successive ones with searches in between.

Knows no search server.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TypeAlias

from ..api.blocks import BlockEnd, ReasoningMode
from ..api.replies import FoldedChoice, total_usage
from ..api.search import SEARCH_NAME, SearchTool, result_part
from ..api.text import decode_arguments
from ..core.errors import ContextLengthExceeded
from ..core.events import (
    Counted,
    Finished,
    FinishReason,
    GenerationEvent,
    PromptProgress,
    SearchDone,
    SearchError,
    Started,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    Written,
)
from ..core.messages import Message, Part, ReasoningPart, TextPart, ToolCallPart, ToolChoice
from ..core.receipt import PromptChange
from ..core.request import Request
from ..engine.client import EngineClient, Generation
from .search_client import SearchClient, SearchFailed

MAX_BUFFERED_EVENTS = 64  # a slow client must block the readers, so that the engine joins deltas
_MORE_ROUNDS = 2  # generations after the last search that a request allows


class PromptBatch:
    """Joins the generations of a request with several prompts, which were entered before.

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
        self._events = asyncio.Queue()  # readers end with a mark, which a full queue would block without end
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


class _Round(FoldedChoice):
    """One generation of the reply."""

    @property
    def searches(self) -> list[ToolCallPart]:
        """Return the searches to run; none if a limit or a stop string ended the reply."""
        end = self.finished
        if end.reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS) or end.stop is not None:
            return []
        return [part for part in self.parts if isinstance(part, ToolCallPart) and part.name == SEARCH_NAME]

    @property
    def calls_client(self) -> bool:
        return any(block.call is not None and block.call.name != SEARCH_NAME for block in self.blocks)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the blocks as the client would send them back."""
        return tuple(_part(block) for block in self.blocks if block.call is not None or block.text)


def _part(block: BlockEnd) -> Part:
    if block.call is not None:
        return ToolCallPart(block.call.call_id, block.call.name, decode_arguments(block.text))
    return ReasoningPart(block.text) if block.kind == "reasoning" else TextPart(block.text)


class SearchingReply:
    """Has the interface of a `Generation`. After the searches of a generation, another one continues the reply."""

    def __init__(
        self, engine: EngineClient, client: SearchClient, request: Request, tool: SearchTool, reasoning: ReasoningMode
    ):
        """Make a reply. `reasoning`: the form in which the client gets it, and in which it would send it back."""
        self._engine = engine
        self._client = client
        self._request = request
        self._tool = tool
        self._reasoning = reasoning
        self._numbers: dict[int, int] = {}  # the new numbers of the client's own calls, if it sees no searches
        self._stack = AsyncExitStack()
        self._generation: Generation | None = None
        self._usage = Usage(prompt_tokens=0)  # the sum of all generations that have ended
        self._written: list[Written] = []  # of all generations
        self._num_searches = 0
        self.num_prompt_tokens = 0
        self.prompt_change: PromptChange | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(written.completion_tokens for written in self._written)

    async def __aenter__(self) -> "SearchingReply":
        generation = await self._submit(self._request)
        self.num_prompt_tokens, self.prompt_change = generation.num_prompt_tokens, generation.prompt_change
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _submit(self, request: Request) -> Generation:
        await self._stack.aclose()
        self._generation = await self._stack.enter_async_context(await self._engine.submit(request))
        return self._generation

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        """Yield the events of all generations as of one. Searches are left out if the protocol cannot show them."""
        async for index, event in self._events():
            if self._tool.is_shown or not isinstance(event, ToolCallStart | ToolCallDelta | ToolCallEnd | SearchDone):
                yield index, event
                continue
            if isinstance(event, ToolCallStart) and event.name != SEARCH_NAME:
                self._numbers[event.index] = len(self._numbers)
            if not isinstance(event, SearchDone) and event.index in self._numbers:
                yield index, replace(event, index=self._numbers[event.index])

    async def _events(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        request, num_rounds = self._request, 0
        while True:
            num_rounds += 1
            done, end = _Round(self._reasoning), None
            assert self._generation is not None, "it was entered"
            async for index, event in self._generation:
                done.feed(event)
                if isinstance(event, Started) and event.written is not None:
                    self._written.append(event.written)
                    event = replace(event, written=self)
                if isinstance(event, Finished):
                    end = event
                elif isinstance(event, Counted):
                    yield index, Counted(self._with_earlier(event.usage))
                elif num_rounds == 1 or not isinstance(event, Started | PromptProgress):
                    yield index, event
            if end is None:
                return  # it has failed
            found = []
            for call in done.searches:
                found.append(await self._search(call))
                yield 0, found[-1]
            self._usage = self._with_earlier(end.usage)
            is_over = done.calls_client or not found or num_rounds > self._tool.max_uses + _MORE_ROUNDS
            if is_over:
                yield 0, self._finished(end, end.reason if done.calls_client or not found else FinishReason.STOP)
                return
            if (request.sampling.max_tokens or math.inf) <= end.usage.completion_tokens:
                yield 0, self._finished(end, FinishReason.LENGTH)
                return
            request = self._following(request, done, found)
            try:
                await self._submit(request)
            except ContextLengthExceeded:
                clamped = replace(end, usage=replace(end.usage, clamped_max_tokens=end.usage.completion_tokens))
                yield 0, self._finished(clamped, FinishReason.LENGTH)
                return

    async def _search(self, call: ToolCallPart) -> SearchDone:
        query = call.arguments.get("query")
        if not isinstance(query, str):
            return self._failed(call, "", "invalid_tool_input")
        if self._num_searches >= self._tool.max_uses:
            return self._failed(call, query, "max_uses_exceeded")
        self._num_searches += 1
        try:
            pages = await self._client.search(query.strip(), self._tool.suffix)
        except SearchFailed as failed:
            return self._failed(call, query, failed.error)
        chosen = [page for page in pages if self._tool.allows(page.url)][: self._tool.num_pages]
        return SearchDone(call.call_id, query, tuple(chosen), arguments=call.arguments)

    @staticmethod
    def _failed(call: ToolCallPart, query: str, error: SearchError) -> SearchDone:
        return SearchDone(call.call_id, query, error=error, arguments=call.arguments)

    def _following(self, request: Request, done: _Round, found: list[SearchDone]) -> Request:
        """Return the request of the next generation: the conversation as the client would send it back."""
        messages = list(request.messages or ())
        parts = done.parts
        if request.continue_final_message:
            parts = _continued(messages.pop().parts, parts)
        messages += [Message("assistant", parts), *(Message("tool", (result_part(result),)) for result in found)]
        sampling = request.sampling
        if sampling.max_tokens is not None:
            sampling = replace(
                sampling, max_tokens=sampling.max_tokens - done.finished.usage.completion_tokens, min_tokens=0
            )
        return replace(
            request,
            messages=tuple(messages),
            sampling=sampling,
            tool_choice=ToolChoice("auto"),
            add_generation_prompt=True,
            continue_final_message=False,
        )

    def _with_earlier(self, usage: Usage) -> Usage:
        """Add the usage of the generations that have ended."""
        return replace(total_usage({0: self._usage, 1: usage}, 1), clamped_max_tokens=None)

    def _finished(self, end: Finished, reason: FinishReason) -> Finished:
        """Return the end of the reply. Its usage is the sum of all generations, with the first receipt."""
        limit = end.usage.clamped_max_tokens
        if limit is not None:  # the limit of the last generation; the ones before it count as well
            limit += self._usage.completion_tokens - end.usage.completion_tokens
        usage = replace(self._usage, num_searches=self._num_searches, clamped_max_tokens=limit)
        return replace(end, reason=reason, usage=usage)


def _continued(begun: tuple[Part, ...], parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Join the text that the client began with the text that follows it."""
    match begun, parts:
        case (*head, TextPart(start)), (TextPart(rest), *tail):
            return (*head, TextPart(start + rest), *tail)
        case _:
            return (*begun, *parts)


RequestGeneration: TypeAlias = Generation | PromptBatch | SearchingReply
