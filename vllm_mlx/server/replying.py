"""The part that all generating routes share: submit, note in the record, answer streamed or complete.

A submission is entered where its response is made, so that every generation has an owner that ends it.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request as HTTPRequest
from starlette.responses import Response

from ..api.encoder import ReplyFold, StreamEncoder
from ..api.reply import Reply
from ..core.request import Request
from .bodies import beside_loop
from .generations import submit_all
from .interfaces import Engine, Generation
from .log import record_of
from .streaming import EventStream, fold_reply
from .tenants import kept_apart

Documented = dict[int | str, dict[str, Any]]
Submission = AbstractAsyncContextManager[Generation]


@asynccontextmanager
async def submit(
    engine: Engine, requests: Sequence[Request], http: HTTPRequest, *, reply_id: str, model: str
) -> AsyncIterator[Generation]:
    """Run the requests inside the block; on leaving it, abort those that still run.

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
    """The request as the engine gets it. Raises InvalidParameter for one beyond the server's limits."""
    await beside_loop(http, partial(http.app.state.limits.check, request))
    return kept_apart(replace(request, arrived_s=record_of(http.scope).started_s), http.scope)


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
