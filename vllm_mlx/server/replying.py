"""The part that all generating routes share: submit requests, note them in the record, reply streamed or complete.

A submission is entered where its response is written, so that every generation has an owner that ends it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from fastapi import Request as HTTPRequest
from starlette.responses import Response

from ..api.replies import Reply, ReplyFold, StreamEncoder
from ..core.events import GenerationEvent
from ..core.receipt import PromptChange
from ..core.request import Request
from .bodies import beside_loop
from .interfaces import Engine, Generation
from .record import record_of
from .streaming import EventStream, fold_reply
from .tenants import with_tenant

MAX_BUFFERED_EVENTS = 64  # a slow client must block the readers, so that the engine joins deltas
Documented = dict[int | str, dict[str, Any]]
Submission = AbstractAsyncContextManager[Generation]


@asynccontextmanager
async def submit(
    engine: Engine, requests: Sequence[Request], http: HTTPRequest, *, reply_id: str, model: str
) -> AsyncIterator[Generation]:
    """Run the requests inside the block; on leaving it, abort the ones that are still running.

    Raises RequestError before any part of the response is sent.
    """
    http.app.state.limits.check_choices(sum(request.sampling.n for request in requests))
    generation = await submit_all(engine, [await admitted(request, http) for request in requests])
    async with generation:
        record_of(http.scope).begin_reply(
            reply_id=reply_id,
            model=model,
            prompt_tokens=generation.num_prompt_tokens,
            num_prompts=len(requests),
            choices_per_prompt=requests[0].sampling.n,
            prompt_change=generation.prompt_change,
        )
        yield generation


async def admitted(request: Request, http: HTTPRequest) -> Request:
    """The request with its tenant and arrival time. Raises InvalidParameter if it exceeds the server's limits."""
    await beside_loop(http, partial(http.app.state.limits.check, request))
    return with_tenant(replace(request, arrived_s=record_of(http.scope).started_s), http.scope)


def streamed(
    http: HTTPRequest,
    submission: Submission,
    encoder_of: Callable[[Generation], StreamEncoder],
    *,
    keep_alive_s: float,
) -> Response:
    return EventStream(submission, encoder_of, record_of(http.scope), keep_alive_s=keep_alive_s)


async def whole(http: HTTPRequest, submission: Submission, fold: ReplyFold) -> Response:
    body = await fold_reply(submission, fold, record_of(http.scope), http.receive)
    headers = record_of(http.scope).receipts.headers()
    return Response(body, headers=headers, media_type="application/json")


def documented(reply: type[Reply], error: type[Reply], events: str) -> Documented:
    """The responses of a route, for /openapi.json. `events` says what a stream contains."""
    stream = {"text/event-stream": {"schema": {"type": "string", "description": f"With `stream`: {events}."}}}
    return {200: {"model": reply, "content": stream}, "4XX": {"model": error}, "5XX": {"model": error}}


async def submit_all(engine: Engine, requests: Sequence[Request]) -> Generation:
    """Submit all requests as one generation. If one raises, the others are ended."""
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
    """The generations of a request with several prompts, as one.

    Choices are numbered prompt by prompt. Events are in order within a choice.
    """

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
        """None: texts to complete belong to no conversation."""
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
