"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

import uuid
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...api.anthropic.decode import decode_count_request, decode_messages_request
from ...api.anthropic.encode import MessageReply, MessageStream, TokenCount, message_fold
from ...api.anthropic.schema import CountTokensBody, MessagesBody
from ...api.error_replies import AnthropicError
from ..bodies import JSONRoute, decoded
from ..config import ServerConfig
from ..interfaces import Engine, Generation
from ..record import record_of
from ..replying import admitted, documented, streamed, submit, whole
from ..streaming import while_connected
from .models import ServedModels

EVENTS = "Anthropic's events, message_start to message_stop"


def anthropic_routes(engine: Engine, config: ServerConfig, models: ServedModels) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=JSONRoute)

    @router.post("/v1/messages", responses=documented(MessageReply, AnthropicError, EVENTS))
    async def messages(body: MessagesBody, http: Request) -> Response:
        """Messages with tools and thinking, streamed or complete."""
        reply_id = f"msg_{uuid.uuid4().hex}"
        decode = partial(
            decode_messages_request,
            body,
            reply_id=reply_id,
            model=models.resolve(body.model),
            messages_thinking=config.messages_thinking,
        )
        found = await decoded(http, body, decode)
        spec = found.reply
        submission = submit(engine, [found.request], http, reply_id=reply_id, model=spec.model)
        if spec.stream:

            def encoder_of(generation: Generation) -> MessageStream:
                return MessageStream(spec, prompt_tokens=generation.num_prompt_tokens)

            return streamed(http, submission, encoder_of, keep_alive_s=config.keep_alive_s)
        return await whole(http, submission, message_fold(spec))

    @router.post("/v1/messages/count_tokens", responses={200: {"model": TokenCount}, "4XX": {"model": AnthropicError}})
    async def count_tokens(body: CountTokensBody, http: Request) -> Response:
        """Count the tokens of the prompt that /v1/messages would build from the same fields. Nothing is generated."""
        models.resolve(body.model)
        request_id = record_of(http.scope).request_id
        request = await decoded(http, body, partial(decode_count_request, body, request_id=request_id))
        num_tokens = await while_connected(http.receive, engine.count_tokens(await admitted(request, http)))
        count = TokenCount(input_tokens=num_tokens)
        return Response(count.to_json(), media_type="application/json")

    return router
