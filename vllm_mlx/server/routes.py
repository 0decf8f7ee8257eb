"""The routes of chat, completions, Messages and models, and their replies, streamed or complete.

To clients, every served name is a model. A client that disconnects ends its generation. A submission is entered where
its response is written, so that every generation has an owner that ends it.
"""

# Why no library writes the events: sse-starlette patches uvicorn's signal handling when imported, sends pings
# even if the stream is not silent, and takes 8 µs an event; fastapi.sse takes 38. This takes 2.

import asyncio
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api.anthropic.decode import MessageSpec, decode_count_request, decode_messages_request
from ..api.anthropic.encode import MessageReply, MessageStream, TokenCount, message_fold
from ..api.anthropic.schema import CountTokensBody, MessagesBody
from ..api.encoders.decode import EncoderSpec, decode_texts
from ..api.encoders.encode import EmbeddingList, EncoderFold, RerankReply
from ..api.encoders.schema import EmbeddingBody, RerankBody
from ..api.error_replies import OPENAI, AnthropicError, OpenAIError
from ..api.openai.decode import AnyChatBody, ReplySpec, decode_chat, decode_completion, decode_responses_as_chat
from ..api.openai.encode import ChatStream, CompletionStream, chat_fold, completion_fold
from ..api.openai.replies import LOADED, ChatCompletion, Completion, LoadStatus, ModelCard, ModelList
from ..api.openai.schema import ChatCompletionBody, CompletionBody, ResponsesAsChatBody
from ..api.parameters import Decoded, Spec
from ..api.replies import MANY_LOGPROBS, Reply, ReplyFold, StreamEncoder, given
from ..api.responses.encode import ResponseStream
from ..core.catalogue import Catalogue
from ..core.errors import GenerationError, Overloaded, VLLMMLXError
from ..core.events import Failed, Finished, FinishReason, GenerationEvent, TextDelta
from ..core.request import Request
from ..engine.client import EngineClient
from ..engine.found_models import FoundModels
from .bodies import B, Call, D, JSONRoute, decoded
from .config import ServerConfig
from .error_handlers import CLIENT_GONE, ClientGone
from .generations import PromptBatch, RequestGeneration, SearchingReply
from .guards import require_admin, shown_model, with_tenant
from .log import RequestRecord, error_of, record_of
from .search_client import SearchClient

OPENAI_EVENTS = "chunks, then [DONE]"
ANTHROPIC_EVENTS = "Anthropic's events, message_start to message_stop"
_OF_COMMAND: dict[int | str, dict[str, Any]] = {200: {"model": ModelCard}, "4XX": {"model": OpenAIError}}
HEAD_WAIT_S = 1.0  # how long the response head waits for the cache receipts of all prompts
Submission = AbstractAsyncContextManager[RequestGeneration]
Fold = ReplyFold | EncoderFold | ResponseStream
T = TypeVar("T")


def documented(reply: type[Reply], error: type[Reply], events: str) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route, for /openapi.json. `events` describes the contents of a stream."""
    stream = {"text/event-stream": {"schema": {"type": "string", "description": f"With `stream`: {events}."}}}
    return {200: {"model": reply, "content": stream}, "4XX": {"model": error}, "5XX": {"model": error}}


def as_json(reply: Reply) -> Response:
    return Response(reply.to_json(), media_type="application/json")


class ReplyCall(Call[B, D]):
    """A call whose reply is generated."""

    @abstractmethod
    def stream(self, found: D, generation: RequestGeneration) -> StreamEncoder:
        """Return the encoder of a streamed reply to the decoded requests."""

    @abstractmethod
    def fold(self, found: D) -> Fold:
        """Return the fold of a complete reply to the decoded requests."""


class ChatCall(ReplyCall[ChatCompletionBody | ResponsesAsChatBody, Decoded[ReplySpec]]):
    """Chat completions. Some clients send the body of Responses there."""

    def decode(self) -> Decoded[ReplySpec]:
        spec = ReplySpec(reply_id=f"chatcmpl-{uuid.uuid4().hex}", model=self.model, created=int(time.time()))
        is_separate = self.config.separate_reasoning
        if isinstance(self.body, ChatCompletionBody):
            return decode_chat(self.body, spec, separate_reasoning=is_separate, searches=self.searches)
        return decode_responses_as_chat(self.body, spec, separate_reasoning=is_separate, searches=self.searches)

    def stream(self, found: Decoded[ReplySpec], generation: RequestGeneration) -> StreamEncoder:
        return ChatStream(found.reply, self.front.tokenizer, prompt_tokens=generation.num_prompt_tokens)

    def fold(self, found: Decoded[ReplySpec]) -> ReplyFold:
        return chat_fold(found.reply, self.front.tokenizer)


class CompletionCall(ReplyCall[CompletionBody, Decoded[ReplySpec]]):
    """Completions of one or several texts."""

    def decode(self) -> Decoded[ReplySpec]:
        spec = ReplySpec(reply_id=f"cmpl-{uuid.uuid4().hex}", model=self.model, created=int(time.time()))
        return decode_completion(self.body, spec)

    def stream(self, found: Decoded[ReplySpec], generation: RequestGeneration) -> StreamEncoder:
        return CompletionStream(found.reply, self.front.tokenizer)

    def fold(self, found: Decoded[ReplySpec]) -> ReplyFold:
        return completion_fold(found.reply, self.front.tokenizer)


class MessagesCall(ReplyCall[MessagesBody, Decoded[MessageSpec]]):
    """Messages of Anthropic's protocol."""

    def decode(self) -> Decoded[MessageSpec]:
        spec, policy = MessageSpec(reply_id=f"msg_{uuid.uuid4().hex}", model=self.model), self.config.messages_thinking
        return decode_messages_request(self.body, spec, messages_thinking=policy, searches=self.searches)

    def stream(self, found: Decoded[MessageSpec], generation: RequestGeneration) -> StreamEncoder:
        return MessageStream(found.reply, prompt_tokens=generation.num_prompt_tokens)

    def fold(self, found: Decoded[MessageSpec]) -> ReplyFold:
        return message_fold(found.reply)


class EncoderCall(ReplyCall[EmbeddingBody | RerankBody, Decoded[EncoderSpec]]):
    """Texts of which an encoder computes the vectors, or documents that it scores."""

    def decode(self) -> Decoded[EncoderSpec]:
        return decode_texts(self.body, reply_id=f"{self.body.task}-{uuid.uuid4().hex}", model=self.model)

    def stream(self, found: Decoded[EncoderSpec], generation: RequestGeneration) -> StreamEncoder:
        raise AssertionError("these bodies ask for no stream")

    def fold(self, found: Decoded[EncoderSpec]) -> EncoderFold:
        return EncoderFold(found.reply)


@dataclass(frozen=True, slots=True)
class CountCall(Call[CountTokensBody, Decoded[None]]):
    """A prompt of Messages whose tokens are counted."""

    request_id: str

    def decode(self) -> Decoded[None]:
        return decode_count_request(self.body, request_id=self.request_id, searches=self.searches)


def openai_routes(engine: EngineClient, config: ServerConfig) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JSONRoute)

    @router.post("/v1/chat/completions", responses=documented(ChatCompletion, OpenAIError, OPENAI_EVENTS))
    async def chat_completions(body: AnyChatBody, http: HTTPRequest) -> Response:
        """Chat with tools and reasoning, streamed or complete."""
        return await reply_to(engine, http, ChatCall.of(body, engine, config))

    @router.post("/v1/completions", responses=documented(Completion, OpenAIError, OPENAI_EVENTS))
    async def completions(body: CompletionBody, http: HTTPRequest) -> Response:
        """Continue a text, or several."""
        return await reply_to(engine, http, CompletionCall.of(body, engine, config))

    @router.post("/v1/embeddings", responses={200: {"model": EmbeddingList}, "4XX": {"model": OpenAIError}})
    async def embeddings(body: EmbeddingBody, http: HTTPRequest) -> Response:
        """Compute the vectors of texts."""
        return await reply_to(engine, http, EncoderCall.of(body, engine, config))

    @router.post("/rerank", include_in_schema=False)
    @router.post("/v2/rerank", include_in_schema=False)
    @router.post("/v1/rerank", responses={200: {"model": RerankReply}, "4XX": {"model": OpenAIError}})
    async def rerank(body: RerankBody, http: HTTPRequest) -> Response:
        """Score documents by how well they answer a query. The paths /rerank and /v2/rerank do the same."""
        return await reply_to(engine, http, EncoderCall.of(body, engine, config))

    return router


def anthropic_routes(engine: EngineClient, config: ServerConfig) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=JSONRoute)

    @router.post("/v1/messages", responses=documented(MessageReply, AnthropicError, ANTHROPIC_EVENTS))
    async def messages(body: MessagesBody, http: HTTPRequest) -> Response:
        """Messages with tools and thinking, streamed or complete."""
        return await reply_to(engine, http, MessagesCall.of(body, engine, config))

    @router.post("/v1/messages/count_tokens", responses={200: {"model": TokenCount}, "4XX": {"model": AnthropicError}})
    async def count_tokens(body: CountTokensBody, http: HTTPRequest) -> Response:
        """Count the tokens of the prompt that /v1/messages would build from the same fields. Nothing is generated."""
        call = CountCall.of(body, engine, config, request_id=record_of(http.scope).request_id)
        return as_json(TokenCount(input_tokens=await num_tokens(engine, http, call)))

    return router


@asynccontextmanager
async def submit(
    engine: EngineClient, requests: Sequence[Request], http: HTTPRequest, spec: Spec
) -> AsyncIterator[RequestGeneration]:
    """Run the requests inside the block; on leaving it, abort the ones that are still running.

    Raises RequestError before any part of the response is sent.
    """
    num_choices = requests[0].sampling.n
    client: SearchClient | None = http.app.state.search
    record, texts = record_of(http.scope), requests[0].texts
    counts = isinstance(spec, ReplySpec) and spec.continuous_usage
    ready = [replace(owned(request, http, spec.model), counts=counts) for request in requests]
    for path in spec.left_out:
        record.unknown_fields.note(path)
    async with AsyncExitStack() as stack:
        if client is not None and spec.search is not None:
            reply = SearchingReply(engine, client, ready[0], spec.search, spec.reasoning)
            generation: RequestGeneration = await stack.enter_async_context(reply)
        else:
            opened = [await stack.enter_async_context(await engine.submit(request)) for request in ready]
            generation = opened[0]
            if len(opened) > 1:
                generation = await stack.enter_async_context(PromptBatch(opened, num_choices))
        record.num_inputs = None if texts is None else len(texts.texts)
        record.begin_reply(
            spec.reply_id, spec.model, generation, num_prompts=len(requests), choices_per_prompt=num_choices
        )
        yield generation


def owned(request: Request, http: HTTPRequest, model: str | None) -> Request:
    """Return the request with its tenant, client, endpoint, arrival time and the requested `model`."""
    record, models = record_of(http.scope), http.app.state.config.models
    _, position = models.resolve(model)
    record.served_by = models.entries[position].name
    known = replace(request, arrived_s=record.started_s, client=record.client, path=record.path, model=position)
    return with_tenant(known, http.scope)


async def num_tokens(engine: EngineClient, http: HTTPRequest, call: Call[B, D]) -> int:
    """Decode the body, and count the tokens of its prompt."""
    request = owned((await decoded(http, call)).request, http, call.model)
    return await while_connected(http.receive, engine.count_tokens(request))


async def reply_to(engine: EngineClient, http: HTTPRequest, call: ReplyCall[B, D]) -> Response:
    """Decode the body, and reply to its requests."""
    return await respond_to(engine, http, call, await decoded(http, call))


async def respond_to(engine: EngineClient, http: HTTPRequest, call: ReplyCall[B, D], found: D) -> Response:
    """Return the reply to the decoded requests: a stream of events if the client asked for it, else complete."""
    record, submission = record_of(http.scope), submit(engine, found.requests, http, found.reply)
    if found.reply.stream:
        return EventStream(submission, call, found, record)
    body = await while_connected(http.receive, fold_reply(submission, call.fold(found), record))
    return Response(body, headers=record.receipts.headers(), media_type="application/json")


class EventStream(Response, Generic[B, D]):
    """Server-sent events of one generation, which is submitted when the response is sent.

    An error before the head of the response is due is raised, so that its own HTTP status is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, submission: Submission, call: ReplyCall[B, D], found: D, record: RequestRecord) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._submission = submission
        self._call, self._found = call, found
        self._encoder: StreamEncoder | None = None  # set once the generation is submitted
        self._record = record
        self._keep_alive_s = call.config.keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _EventWriter(send)
        try:
            await while_connected(receive, self._answer(writer), self._keep_alive(writer))
        except ClientGone:
            self._record.status = CLIENT_GONE
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer(self, writer: "_EventWriter") -> None:
        """Write all events; an error is the last one. Raise it if the head of the response is not due yet."""
        error = await error_of(self._write_events(writer))
        try:
            if error is None:
                return
            if not writer.is_head_due.is_set():
                raise error
            assert self._encoder is not None, "the head is due after the encoder was made"
            await writer.write(self._encoder.fail(for_client(error, self._record)))
        finally:
            del error  # its frames lead here: both would stay in memory

    async def _write_events(self, writer: "_EventWriter") -> None:
        """Write all events. The generation ends before the last bytes are written."""
        record, is_head_due = self._record, writer.is_head_due
        async with self._submission as generation:
            encoder = self._encoder = self._call.stream(self._found, generation)
            asyncio.get_running_loop().call_later(min(HEAD_WAIT_S, self._keep_alive_s / 2), is_head_due.set)
            await writer.write(encoder.open())
            async for index, event in generation:
                # An error that says when to retry does so in the head of its own response.
                is_refused = isinstance(event, Failed) and isinstance(event.error, Overloaded)
                if not is_refused and not is_head_due.is_set() and record.receipts.take(index, event):
                    is_head_due.set()
                raise_if_failed(event)
                record.observe(index, event)
                is_long = isinstance(event, TextDelta) and len(event.logprobs) > MANY_LOGPROBS
                feed = encoder.feed
                await writer.write(await asyncio.to_thread(feed, index, event) if is_long else feed(index, event))
        is_head_due.set()
        await writer.write(encoder.close())

    async def _keep_alive(self, writer: "_EventWriter") -> None:
        """Write the head when it is due, and then an event after each silence of `keep_alive_s`."""
        await writer.is_head_due.wait()
        assert self._encoder is not None, "the head is due after the encoder was made"
        self.headers.update(self._record.receipts.headers())
        await writer.begin(self.status_code, self.raw_headers)
        while True:
            await writer.wait_for_silence(self._keep_alive_s)
            await writer.write(self._encoder.keep_alive())


def for_client(error: Exception, record: RequestRecord) -> VLLMMLXError:
    """Return the error that the client reads, which is also noted in the record. A fault of the server is logged."""
    if isinstance(error, VLLMMLXError):
        record.error_code, record.error_message = OPENAI.error(error).code, error.message
        return error
    record.note_fault(error)
    return GenerationError("The server failed on this request.")


class _EventWriter:
    """Sends parts of the response, holds them back until the head was sent, and knows when the last one was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._now = asyncio.get_running_loop().time
        self._last_s = self._now()
        self._is_writing = False
        self._held = bytearray()
        self._has_begun = asyncio.Event()
        self.is_head_due = asyncio.Event()  # from now on an error can only be an event of the stream

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head and the parts held back."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": bytes(self._held), "more_body": True})
        self._last_s = self._now()
        self._has_begun.set()

    async def write(self, data: bytes) -> None:
        if not self.is_head_due.is_set():
            self._held += data
            return
        await self._has_begun.wait()
        if not data:
            return
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_writing = False
        self._last_s = self._now()

    async def wait_for_silence(self, seconds: float) -> None:
        """Return after `seconds` without a write. While a write waits for the client, there is no silence."""
        while True:
            rest = seconds if self._is_writing else self._last_s + seconds - self._now()
            if rest <= 0:
                return
            await asyncio.sleep(rest)


async def fold_reply(submission: Submission, fold: Fold, record: RequestRecord) -> bytes:
    """Generate the complete reply and return its body. Raises the error of the generation."""
    async with submission as generation:
        await feed_all(generation, fold, record)
    return await asyncio.to_thread(fold.finish) if fold.is_long else fold.finish()


async def feed_all(generation: RequestGeneration, fold: Fold, record: RequestRecord) -> None:
    """Fold all events of the generation. Raises its error if it fails."""
    async for index, event in generation:
        raise_if_failed(event)
        record.observe(index, event)
        fold.feed(index, event)


def raise_if_failed(event: GenerationEvent) -> None:
    if isinstance(event, Failed):
        raise event.error
    if isinstance(event, Finished) and event.reason is FinishReason.ABORT:
        raise GenerationError("The server ended this reply before it was complete. Send the request again.")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], *beside: Coroutine[Any, Any, None]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientGone.

    The coroutines of `beside` run as long as `work` does. On return none of the tasks is running.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    helpers = [asyncio.create_task(coroutine) for coroutine in beside]
    everything = [task, gone, *helpers]
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            gone.result()
            raise ClientGone
        for helper in helpers:
            if helper.done():
                helper.result()
        raise AssertionError("the coroutines beside the work never return")
    finally:
        for running in everything:
            running.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def models_routes(engine: EngineClient, models: Catalogue, found: FoundModels | None, *, searches: bool) -> APIRouter:
    router = APIRouter(tags=["Models"])

    def card(name: str, scope: Scope) -> ModelCard:
        one = models.on_disk(name)
        if one is None or one.position is not None:
            name, position = models.resolve(name)
            entry, front, state = models.entries[position], engine.fronts[position], engine.state_of(position)
            created, root, length = front.info.created, front.info.model, front.info.max_model_len
            facts: dict[str, Any] = {"load_bytes": front.info.weights_bytes, "capabilities": front.capabilities}
            facts |= {"pinned": entry.pin, "aliases": [other for other in entry.names if other != name]}
            has_template = front.tokenizer.chat_template is not None or front.info.task != "chat"
            facts["task"] = front.info.task if has_template else "completion"
        else:
            state = "unloaded" if one.fault is None else "failed"
            created, root, length = 0, str(one.folder), one.max_model_len or 0
            facts = {"load_bytes": one.file_bytes, "capabilities": [], "pinned": False}
        if one is not None and one in models.others:
            name, *aliases = one.names
            facts |= {"aliases": aliases, "task": one.task, "found": True} | given(cause=one.fault)
        return ModelCard(
            id=name,
            created=created,
            owned_by="vllm-mlx",
            root=shown_model(scope, root),
            max_model_len=length,
            display_name=name,
            created_at=datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
            max_input_tokens=length,
            state="ready" if state == "leaving" else state,
            status=LoadStatus(value=LOADED[state]),
            web_search=searches,
            **facts,
        )

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models", responses={200: {"model": ModelList}})
    async def list_models(http: HTTPRequest) -> Response:
        if found is not None:
            await found.look()
        names = [name for entry in models.named for name in entry.names] + [each.names[0] for each in models.others]
        cards = [card(name, http.scope) for name in names]
        ids: list[Any] = [each.id for each in cards] or [None]
        return as_json(ModelList(data=cards, first_id=ids[0], last_id=ids[-1]))

    @router.get("/v1/models/{model_id:path}", responses={200: {"model": ModelCard}, "4XX": {"model": OpenAIError}})
    async def show_model(model_id: str, http: HTTPRequest) -> Response:
        return as_json(card(model_id, http.scope))

    @router.post("/v1/models/{model_id:path}/load", responses=_OF_COMMAND)
    @router.post("/v1/models/{model_id:path}/unload", responses=_OF_COMMAND)
    async def move_weights(model_id: str, http: HTTPRequest, wait: bool = False) -> Response:
        """Bring the weights into memory, or let them leave until a request or a command loads them again.

        The answer comes immediately, or with `wait` at the end. A model in use stays: 409.
        """
        require_admin(http.scope)
        if found is not None:
            await found.need(model_id)
        _, position = models.resolve(model_id)
        is_load = http.url.path.endswith("/load")
        await (engine.load_model if is_load else engine.unload_model)(position, wait=wait)
        name = model_id if models.on_disk(model_id) is not None else models.entries[position].name
        return as_json(card(name, http.scope))

    return router
