"""What all routes that generate do alike: submit, note in the record, answer streamed or whole."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request as HTTPRequest
from starlette.responses import Response

from ..api.encoder import ReplyFold, StreamEncoder
from ..api.reply import Reply
from ..core.request import Request
from .generations import submit_all
from .log import record_of
from .ports import Engine, Generation
from .streaming import EventStream, fold_reply

Documented = dict[int | str, dict[str, Any]]


async def submit(
    engine: Engine, requests: Sequence[Request], http: HTTPRequest, *, reply_id: str, model: str
) -> Generation:
    """Raises RequestError before anything of the answer is sent."""
    generation = await submit_all(engine, requests)
    record_of(http.scope).begin_reply(
        reply_id=reply_id,
        model=model,
        prompt_tokens=generation.num_prompt_tokens,
        choices_per_prompt=requests[0].sampling.n,
    )
    return generation


def streamed(http: HTTPRequest, generation: Generation, encoder: StreamEncoder, *, keep_alive_s: float) -> Response:
    return EventStream(generation, encoder, record_of(http.scope), keep_alive_s=keep_alive_s)


async def whole(http: HTTPRequest, generation: Generation, fold: ReplyFold) -> Response:
    body = await fold_reply(generation, fold, record_of(http.scope), http.receive)
    return Response(body, media_type="application/json")


def documented(reply: type[Reply], error: type[Reply], events: str) -> Documented:
    """The answers of a route, for /openapi.json. `events` says what a stream holds."""
    stream = {"text/event-stream": {"schema": {"type": "string", "description": f"With `stream`: {events}."}}}
    return {200: {"model": reply, "content": stream}, "4XX": {"model": error}, "5XX": {"model": error}}
