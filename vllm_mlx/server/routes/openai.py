"""`POST /v1/chat/completions` and `POST /v1/completions`."""

import time
import uuid
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...api.error_replies import OpenAIError
from ...api.openai.decode import Decoded, decode_chat, decode_completion
from ...api.openai.encode import ChatStream, CompletionStream, chat_fold, completion_fold
from ...api.openai.replies import ChatCompletion, Completion
from ...api.openai.schema import ChatCompletionBody, CompletionBody
from ..bodies import JSONRoute, decoded
from ..config import ServerConfig
from ..interfaces import Engine
from ..replying import Submission, documented, streamed, submit, whole
from .models import ServedModels

EVENTS = "chunks, then [DONE]"


def openai_routes(engine: Engine, config: ServerConfig, models: ServedModels) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JSONRoute)
    names = engine.token_names
    keep_alive_s = config.keep_alive_s

    @router.post("/v1/chat/completions", responses=documented(ChatCompletion, OpenAIError, EVENTS))
    async def chat_completions(body: ChatCompletionBody, http: Request) -> Response:
        """Chat with tools and reasoning, streamed or complete."""
        decode = partial(
            decode_chat,
            body,
            reply_id=f"chatcmpl-{uuid.uuid4().hex}",
            model=models.resolve(body.model),
            created=int(time.time()),
            separate_reasoning=config.separate_reasoning,
        )
        found = await decoded(http, body, decode)
        submission, spec = _submit(engine, found, http), found.reply
        if spec.stream:
            return streamed(http, submission, lambda _: ChatStream(spec, names), keep_alive_s=keep_alive_s)
        return await whole(http, submission, chat_fold(spec, names))

    @router.post("/v1/completions", responses=documented(Completion, OpenAIError, EVENTS))
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continue a text, or several."""
        decode = partial(
            decode_completion,
            body,
            reply_id=f"cmpl-{uuid.uuid4().hex}",
            model=models.resolve(body.model),
            created=int(time.time()),
        )
        found = await decoded(http, body, decode)
        submission, spec = _submit(engine, found, http), found.reply
        if spec.stream:
            return streamed(http, submission, lambda _: CompletionStream(spec, names), keep_alive_s=keep_alive_s)
        return await whole(http, submission, completion_fold(spec, names))

    return router


def _submit(engine: Engine, found: Decoded, http: Request) -> Submission:
    spec = found.reply
    return submit(engine, found.requests, http, reply_id=spec.reply_id, model=spec.model)
