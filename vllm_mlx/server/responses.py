"""`/v1/responses`: create, read, delete and cancel responses, and list their input."""

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..api.error_replies import OpenAIError
from ..api.replies import TokenNames
from ..api.responses.decode import DecodedResponse, decode_response
from ..api.responses.encode import ResponseStream
from ..api.responses.replies import Deleted, InputItemList, InputTokens, ResponseReply, ResponseSpec, response
from ..api.responses.schema import InputItem, ItemReference, ResponsesBody
from ..api.responses.stored import MAX_LISTED, KeptInput, StoredResponse, as_input, item_list, stored
from ..core.errors import InvalidParameter, ResponseNotFound, Unsupported, VLLMMLXError, shown
from ..disk.kept import Journal
from ..engine.client import EngineClient
from .bodies import JSONRoute, decoded
from .config import ServerConfig
from .generations import RequestGeneration
from .guards import tenant_of
from .log import record_of
from .response_store import BackgroundReplies, ResponseStore, ResponseStores
from .routes import ReplyCall, as_json, documented, num_tokens, respond_to, submit, while_connected

StoredItem = Mapping[str, Any]
Stored = Mapping[str, StoredItem]  # by the items' ids

EVENTS = "OpenAI's events, response.created to response.completed"


def responses_routes(engine: EngineClient, config: ServerConfig, journal: Journal | None = None) -> APIRouter:
    """Make the routes. `journal` keeps stored responses for the next start."""
    router = APIRouter(tags=["Responses"], route_class=JSONRoute)
    routes = _Responses(engine, config, journal)
    stored_at = "/v1/responses/{response_id}"
    for method, path, endpoint, reply, events in (
        ("POST", "/v1/responses", routes.responses, ResponseReply, EVENTS),
        ("GET", stored_at, routes.read, ResponseReply, "nothing"),
        ("DELETE", stored_at, routes.delete, Deleted, "nothing"),
        ("POST", "/v1/responses/input_tokens", routes.input_tokens, InputTokens, "nothing"),
        ("POST", "/v1/responses/compact", routes.compact, OpenAIError, "nothing"),
        ("POST", f"{stored_at}/cancel", routes.cancel, ResponseReply, "nothing"),
        ("GET", f"{stored_at}/input_items", routes.input_items, InputItemList, "nothing"),
    ):
        router.add_api_route(path, endpoint, methods=[method], responses=documented(reply, OpenAIError, events))
    return router


class _Responses:
    """The endpoints, with the stored responses and the background replies that they share."""

    def __init__(self, engine: EngineClient, config: ServerConfig, journal: Journal | None) -> None:
        self._engine = engine
        self._config = config
        self._stores = ResponseStores(len(config.api_keys), journal)
        self._background = BackgroundReplies()

    async def responses(self, body: ResponsesBody, http: Request) -> Response:
        """Create a response with tools and reasoning: streamed, complete, or in the background."""
        store = await self._store(http)
        call = self._call(body, store, f"resp_{uuid.uuid4().hex}")
        found = await decoded(http, call)
        if found.reply.store:
            store.check_room(stored(found.kept, response(found.reply, "queued"), call.previous_id))
        if found.reply.background:
            return await self._in_background(http, call, found)
        return await respond_to(self._engine, http, call, found)

    def _call(self, body: ResponsesBody, store: ResponseStore, reply_id: str) -> "ResponsesCall":
        return ResponsesCall.of(
            body,
            self._engine,
            self._config,
            store=store,
            reply_id=reply_id,
            referenced=_referenced(body, store),
            earlier=_earlier(body.previous_response_id, store),
            previous_id=body.previous_response_id,
        )

    async def input_tokens(self, body: ResponsesBody, http: Request) -> Response:
        """Count the tokens of the prompt that a response to this body would have. Nothing is generated or stored."""
        call = self._call(body, await self._store(http), record_of(http.scope).request_id)
        return as_json(InputTokens(input_tokens=await num_tokens(self._engine, http, call)))

    async def compact(self) -> Response:
        """Answer that this server compacts no conversations."""
        raise HTTPException(404, "This server compacts no conversations: ask for a summary in a message.")

    async def read(self, response_id: str, http: Request, stream: bool = False) -> Response:
        """Read a stored response in its current state."""
        if stream:
            raise Unsupported("A stored response is not streamed again. Leave `stream` out.", param="stream")
        return as_json(_found(await self._store(http), response_id).reply)

    async def delete(self, response_id: str, http: Request) -> Response:
        """Delete a response. If it is still running, it is cancelled."""
        store = await self._store(http)
        _found(store, response_id)
        await self._background.cancel(response_id)
        store.remove(response_id)
        return as_json(Deleted(id=response_id))

    async def cancel(self, response_id: str, http: Request) -> Response:
        """Cancel a background response. A response that has ended is not changed."""
        store = await self._store(http)
        found = _found(store, response_id)
        if not found.reply.background:
            raise InvalidParameter("Only a response made with `background` can be cancelled.", param="response_id")
        if await self._background.cancel(response_id):
            found.reply.status = "cancelled"
            store.changed(response_id)
        return as_json(found.reply)

    async def input_items(
        self,
        response_id: str,
        http: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List the input of a stored response."""
        store = await self._store(http)
        _found(store, response_id)
        items = store.input_of(response_id)
        return as_json(item_list(items, limit=limit, after=after, newest_first=order == "desc"))

    async def _store(self, http: Request) -> ResponseStore:
        return await self._stores.of(tenant_of(http.scope))

    async def _in_background(self, http: Request, call: "ResponsesCall", found: DecodedResponse) -> Response:
        """Store the response before it is submitted: if it cannot be stored, it is refused before anything runs."""
        spec = found.reply
        answer = as_json(response(spec, "queued"))
        fold = call.fold(found)
        fold.keep(response(spec, "in_progress"))
        submission = submit(self._engine, found.requests, http, spec)
        starting = self._background.start(spec.reply_id, submission, fold, record_of(http.scope))
        with ExitStack() as undone:
            undone.callback(call.store.remove, spec.reply_id)
            await while_connected(http.receive, starting)
            undone.pop_all()
        return answer


@dataclass(frozen=True, slots=True)
class ResponsesCall(ReplyCall[ResponsesBody, DecodedResponse]):
    """A response to an input, and to the stored items that the input continues."""

    store: ResponseStore
    reply_id: str
    referenced: Stored
    earlier: Sequence[StoredItem]
    previous_id: str | None

    @property
    def is_long(self) -> bool:
        return self.previous_id is not None

    def decode(self) -> DecodedResponse:
        return decode_response(
            _resolved(self.body, self.referenced),
            ResponseSpec(reply_id=self.reply_id, model=self.model, created_at=int(time.time())),
            earlier=as_input(self.earlier),
            searches=self.searches,
            usual={"temperature": self.front.info.temperature, "top_p": self.front.info.top_p},
        )

    def stream(self, found: DecodedResponse, generation: RequestGeneration) -> ResponseStream:
        return self.fold(found)

    def fold(self, found: DecodedResponse) -> "KeptResponse":
        names = None if found.request.sampling.logprobs is None else self.front.tokenizer
        store = self.store if found.reply.store else None
        return KeptResponse(found.reply, names, found.kept, store, self.previous_id)


class KeptResponse(ResponseStream):
    """Keeps the response with its input once it has ended. A client that disconnects leaves nothing."""

    def __init__(
        self,
        spec: ResponseSpec,
        names: TokenNames | None,
        kept: KeptInput,
        store: ResponseStore | None,
        previous_id: str | None,
    ) -> None:
        """`kept`: the input of this turn. Without a `store`, nothing is kept."""
        super().__init__(spec, names)
        self._input, self._store, self._previous_id = kept, store, previous_id
        self._is_kept = False

    def fail(self, error: VLLMMLXError) -> bytes:
        wire = super().fail(error)
        self._keep()
        return wire

    def close(self) -> bytes:
        self._keep()
        return super().close()

    def finish(self) -> bytes:
        self._keep()
        return super().finish()

    def _keep(self) -> None:
        if not self._is_kept:
            self._is_kept = True  # if storing fails, `fail` follows, which must not try it again
            self.keep(self.reply)

    def keep(self, reply: ResponseReply) -> None:
        reply.completed_at = int(time.time()) if reply.status == "completed" else None
        if self._store is not None:
            self._store.put(stored(self._input, reply, self._previous_id))


def _earlier(previous_id: str | None, store: ResponseStore) -> Sequence[StoredItem]:
    if previous_id is None:
        return []
    conversation, previous = store.conversation(previous_id), store.get(previous_id)
    if previous is not None and previous.reply.status in ("queued", "in_progress"):
        raise InvalidParameter(f"The response `{shown(previous_id)}` has not ended yet.", param="previous_response_id")
    if conversation is None:
        raise ResponseNotFound(_why_lost(shown(previous_id), previous), param="previous_response_id")
    return conversation


def _why_lost(name: str, response: StoredResponse | None) -> str:
    if response is not None:
        return f"An earlier part of the conversation of `{name}` was removed. Send the complete input instead."
    return (
        f"The response `{name}` is not stored here: it was made by another server, with another API key or with "
        "`store` false, or it was removed. Send the complete input instead. If a router stands before several servers, "
        "it must send all requests of a conversation to one of them; docs/scaling.md says how."
    )


def _referenced(body: ResponsesBody, store: ResponseStore) -> Stored:
    """Return the stored items that `body` refers to, by their ids."""
    if isinstance(body.input, str):
        return {}
    ids = {item.id for item in body.input if isinstance(item, ItemReference)}
    return {item_id: item for item_id in ids if (item := store.item(item_id)) is not None}


def _resolved(body: ResponsesBody, referenced: Stored) -> ResponsesBody:
    """Return the body with references to stored items replaced by the items."""
    if not referenced or isinstance(body.input, str):
        return body
    items: list[InputItem] = []
    for item in body.input:
        known = referenced.get(item.id) if isinstance(item, ItemReference) else None
        items += [item] if known is None else as_input([known])
    return body.model_copy(update={"input": items})


def _found(store: ResponseStore, response_id: str) -> StoredResponse:
    if (found := store.get(response_id)) is None:
        raise HTTPException(404, f"No response `{shown(response_id)}` is stored here.")
    return found
