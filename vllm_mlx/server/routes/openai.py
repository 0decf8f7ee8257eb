"""`POST /v1/chat/completions` and `POST /v1/completions`."""

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...api.encoder import ReplyFold, StreamEncoder
from ...api.openai.decode import Decoded, decode_chat, decode_completion
from ...api.openai.encode import ChatStream, CompletionStream
from ...api.openai.fold import ChatFold, CompletionFold
from ...api.openai.replies import ChatCompletion, Completion, ErrorReply, Reply
from ...api.openai.schema import ChatCompletionBody, CompletionBody
from ..config import ServerConfig
from ..generations import submit_all
from ..log import record_of
from ..models import ServedModels
from ..ports import Engine, Generation
from ..streaming import EventStream, fold_reply


def openai_routes(engine: Engine, config: ServerConfig, models: ServedModels) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])
    names = engine.token_names

    @router.post("/v1/chat/completions", responses=_responses(ChatCompletion))
    async def chat_completions(body: ChatCompletionBody, http: Request) -> Response:
        """Chat with tools and reasoning, streamed or whole."""
        decoded = decode_chat(
            body,
            reply_id=f"chatcmpl-{uuid.uuid4().hex}",
            model=models.resolve(body.model),
            created=int(time.time()),
            separate_reasoning=config.separate_reasoning,
        )
        generation = await _submit(engine, decoded, http)
        spec = decoded.reply
        if spec.stream:
            return streamed(http, generation, ChatStream(spec, names))
        return await whole(http, generation, ChatFold(spec, names))

    @router.post("/v1/completions", responses=_responses(Completion))
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Text that goes on from a prompt, or from each of several."""
        decoded = decode_completion(
            body,
            reply_id=f"cmpl-{uuid.uuid4().hex}",
            model=models.resolve(body.model),
            created=int(time.time()),
        )
        generation = await _submit(engine, decoded, http)
        spec = decoded.reply
        if spec.stream:
            return streamed(http, generation, CompletionStream(spec, names))
        return await whole(http, generation, CompletionFold(spec, names))

    def streamed(http: Request, generation: Generation, encoder: StreamEncoder) -> Response:
        return EventStream(generation, encoder, record_of(http.scope), keep_alive_s=config.keep_alive_s)

    async def whole(http: Request, generation: Generation, fold: ReplyFold) -> Response:
        body = await fold_reply(generation, fold, record_of(http.scope), http.receive)
        return Response(body, media_type="application/json")

    return router


async def _submit(engine: Engine, decoded: Decoded, http: Request) -> Generation:
    spec = decoded.reply
    generation = await submit_all(engine, decoded.requests)
    record_of(http.scope).begin_reply(
        reply_id=spec.reply_id,
        model=spec.model,
        prompt_tokens=generation.num_prompt_tokens,
        choices_per_prompt=spec.choices_per_prompt,
    )
    return generation


def _responses(reply: type[Reply]) -> dict[int | str, dict[str, Any]]:
    stream = {"text/event-stream": {"schema": {"type": "string", "description": "With `stream`: chunks, then [DONE]."}}}
    return {200: {"model": reply, "content": stream}, "4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
