"""The routes of chat, completions, Messages and models. To clients, every served name is a model."""

import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Scope

from ..api.anthropic.decode import MessageSpec, decode_count_request, decode_messages_request
from ..api.anthropic.encode import MessageReply, MessageStream, TokenCount, message_fold
from ..api.anthropic.schema import CountTokensBody, MessagesBody
from ..api.error_replies import AnthropicError, OpenAIError
from ..api.openai.decode import ReplySpec, decode_chat, decode_completion, decode_responses_as_chat
from ..api.openai.encode import ChatStream, CompletionStream, chat_fold, completion_fold
from ..api.openai.replies import LOADED, ChatCompletion, Completion, LoadStatus, ModelCard, ModelList
from ..api.openai.schema import AnyChatBody, ChatCompletionBody, CompletionBody, ResponsesAsChatBody
from ..api.parameters import Decoded
from ..api.replies import Reply, ReplyFold, StreamEncoder
from ..core.catalogue import Catalogue
from ..engine.client import EngineClient
from .bodies import Call, JSONRoute
from .config import ServerConfig
from .generations import RequestGeneration
from .guards import require_admin, shown_model
from .log import record_of
from .streaming import ReplyCall, num_tokens, reply_to

OPENAI_EVENTS = "chunks, then [DONE]"
ANTHROPIC_EVENTS = "Anthropic's events, message_start to message_stop"
_OF_COMMAND: dict[int | str, dict[str, Any]] = {200: {"model": ModelCard}, "4XX": {"model": OpenAIError}}


def documented(reply: type[Reply], error: type[Reply], events: str) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route, for /openapi.json. `events` says what a stream contains."""
    stream = {"text/event-stream": {"schema": {"type": "string", "description": f"With `stream`: {events}."}}}
    return {200: {"model": reply, "content": stream}, "4XX": {"model": error}, "5XX": {"model": error}}


def as_json(reply: Reply) -> Response:
    return Response(reply.to_json(), media_type="application/json")


class ChatCall(ReplyCall[ChatCompletionBody | ResponsesAsChatBody, Decoded[ReplySpec]]):
    """Chat completions. Some clients send the body of Responses there."""

    def decode(self) -> Decoded[ReplySpec]:
        options: dict[str, Any] = {
            "reply_id": f"chatcmpl-{uuid.uuid4().hex}",
            "model": self.model,
            "created": int(time.time()),
            "separate_reasoning": self.config.separate_reasoning,
            "searches": self.searches,
        }
        if isinstance(self.body, ChatCompletionBody):
            return decode_chat(self.body, **options)
        return decode_responses_as_chat(self.body, **options)

    def stream(self, found: Decoded[ReplySpec], generation: RequestGeneration) -> StreamEncoder:
        return ChatStream(found.reply, self.front.tokenizer, prompt_tokens=generation.num_prompt_tokens)

    def fold(self, found: Decoded[ReplySpec]) -> ReplyFold:
        return chat_fold(found.reply, self.front.tokenizer)


class CompletionCall(ReplyCall[CompletionBody, Decoded[ReplySpec]]):
    """Completions of one or several texts."""

    def decode(self) -> Decoded[ReplySpec]:
        reply_id = f"cmpl-{uuid.uuid4().hex}"
        return decode_completion(self.body, reply_id=reply_id, model=self.model, created=int(time.time()))

    def stream(self, found: Decoded[ReplySpec], generation: RequestGeneration) -> StreamEncoder:
        return CompletionStream(found.reply, self.front.tokenizer)

    def fold(self, found: Decoded[ReplySpec]) -> ReplyFold:
        return completion_fold(found.reply, self.front.tokenizer)


class MessagesCall(ReplyCall[MessagesBody, Decoded[MessageSpec]]):
    """Messages of Anthropic's protocol."""

    def decode(self) -> Decoded[MessageSpec]:
        return decode_messages_request(
            self.body,
            reply_id=f"msg_{uuid.uuid4().hex}",
            model=self.model,
            messages_thinking=self.config.messages_thinking,
            searches=self.searches,
        )

    def stream(self, found: Decoded[MessageSpec], generation: RequestGeneration) -> StreamEncoder:
        return MessageStream(found.reply, prompt_tokens=generation.num_prompt_tokens)

    def fold(self, found: Decoded[MessageSpec]) -> ReplyFold:
        return message_fold(found.reply)


@dataclass(frozen=True, slots=True)
class CountCall(Call[CountTokensBody, Decoded[None]]):
    """A prompt of Messages whose tokens are counted."""

    request_id: str

    def decode(self) -> Decoded[None]:
        return decode_count_request(self.body, request_id=self.request_id, searches=self.searches)


def openai_routes(engine: EngineClient, config: ServerConfig) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JSONRoute)

    @router.post("/v1/chat/completions", responses=documented(ChatCompletion, OpenAIError, OPENAI_EVENTS))
    async def chat_completions(body: AnyChatBody, http: Request) -> Response:
        """Chat with tools and reasoning, streamed or complete."""
        return await reply_to(engine, http, ChatCall.of(body, engine, config))

    @router.post("/v1/completions", responses=documented(Completion, OpenAIError, OPENAI_EVENTS))
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continue a text, or several."""
        return await reply_to(engine, http, CompletionCall.of(body, engine, config))

    return router


def anthropic_routes(engine: EngineClient, config: ServerConfig) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=JSONRoute)

    @router.post("/v1/messages", responses=documented(MessageReply, AnthropicError, ANTHROPIC_EVENTS))
    async def messages(body: MessagesBody, http: Request) -> Response:
        """Messages with tools and thinking, streamed or complete."""
        return await reply_to(engine, http, MessagesCall.of(body, engine, config))

    @router.post("/v1/messages/count_tokens", responses={200: {"model": TokenCount}, "4XX": {"model": AnthropicError}})
    async def count_tokens(body: CountTokensBody, http: Request) -> Response:
        """Count the tokens of the prompt that /v1/messages would build from the same fields. Nothing is generated."""
        call = CountCall.of(body, engine, config, request_id=record_of(http.scope).request_id)
        return as_json(TokenCount(input_tokens=await num_tokens(engine, http, call)))

    return router


def models_routes(engine: EngineClient, models: Catalogue, *, searches: bool) -> APIRouter:
    router = APIRouter(tags=["Models"])

    def card(name: str, scope: Scope) -> ModelCard:
        name, position = models.resolve(name)
        entry, front, state = models.entries[position], engine.fronts[position], engine.state_of(position)
        info = front.info
        return ModelCard(
            id=name,
            created=info.created,
            owned_by="vllm-mlx",
            root=shown_model(scope, info.model),
            max_model_len=info.max_model_len,
            display_name=name,
            created_at=datetime.fromtimestamp(info.created, UTC).isoformat().replace("+00:00", "Z"),
            max_input_tokens=info.max_model_len,
            state="ready" if state == "leaving" else state,
            status=LoadStatus(value=LOADED[state]),
            load_bytes=info.weights_bytes,
            pinned=entry.pin,
            aliases=[other for other in entry.names if other != name],
            task="completion" if front.tokenizer.chat_template is None else "chat",
            capabilities=front.capabilities,
            web_search=searches,
        )

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models", responses={200: {"model": ModelList}})
    async def list_models(http: Request) -> Response:
        cards = [card(name, http.scope) for name in models.names]
        return as_json(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))

    @router.get("/v1/models/{model_id:path}", responses={200: {"model": ModelCard}, "4XX": {"model": OpenAIError}})
    async def show_model(model_id: str, http: Request) -> Response:
        return as_json(card(model_id, http.scope))

    @router.post("/v1/models/{model_id:path}/load", responses=_OF_COMMAND)
    @router.post("/v1/models/{model_id:path}/unload", responses=_OF_COMMAND)
    async def move_weights(model_id: str, http: Request, wait: bool = False) -> Response:
        """Bring the weights into memory, or let them leave until a request or a command loads them again.

        The answer comes at once, or with `wait` at the end. A model in use stays: 409.
        """
        require_admin(http.scope)
        _, position = models.resolve(model_id)
        is_load = http.url.path.endswith("/load")
        await (engine.load_model if is_load else engine.unload_model)(position, wait=wait)
        return as_json(card(models.entries[position].name, http.scope))

    return router
