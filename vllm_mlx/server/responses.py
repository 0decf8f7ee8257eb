"""`/v1/responses`: create, read, delete and cancel responses, and list their input."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..api.error_replies import OpenAIError
from ..api.replies import ReplyFold, TokenNames
from ..api.responses.decode import DecodedResponse, decode_response
from ..api.responses.encode import ResponseStream, response_fold
from ..api.responses.replies import Deleted, InputItemList, InputTokens, ResponseReply, ResponseSpec, response
from ..api.responses.schema import InputItem, ItemReference, ResponsesBody
from ..api.responses.stored import MAX_LISTED, StoredResponse, as_input, item_list, stored
from ..core.catalogue import Catalogue
from ..core.errors import InvalidParameter, ResponseNotFound, Unsupported, VLLMMLXError, shown
from ..disk.kept import Journal
from ..engine.client import EngineClient
from .bodies import JSONRoute, decoded
from .config import ServerConfig
from .guards import tenant_of
from .log import record_of
from .response_store import BackgroundReplies, ResponseStore, ResponseStores
from .routes import as_json, documented
from .streaming import Submission, owned, respond_with, submit, while_connected

StoredItem = Mapping[str, Any]
Keep = Callable[[ResponseReply], None]
Stored = Mapping[str, StoredItem]  # by the items' ids

EVENTS = "OpenAI's events, response.created to response.completed"


def responses_routes(
    engine: EngineClient, config: ServerConfig, models: Catalogue, journal: Journal | None = None
) -> APIRouter:
    """`journal`: keeps stored responses for the next start."""
    router = APIRouter(tags=["Responses"], route_class=JSONRoute)
    routes = _Responses(engine, config, models, journal)
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

    def __init__(self, engine: EngineClient, config: ServerConfig, models: Catalogue, journal: Journal | None) -> None:
        self._engine = engine
        self._searches = config.web_search is not None
        self._models = models
        self._stores = ResponseStores(len(config.api_keys), journal)
        self._background = BackgroundReplies()

    async def responses(self, body: ResponsesBody, http: Request) -> Response:
        """Create a response with tools and reasoning: streamed, complete, or in the background."""
        (model, position), store = self._models.resolve(body.model), await self._store(http)
        info = self._engine.fronts[position].info
        decode = partial(
            _decoded,
            body,
            _referenced(body, store),
            _earlier(body, store),
            reply_id=f"resp_{uuid.uuid4().hex}",
            model=model,
            created_at=int(time.time()),
            searches=self._searches,
            usual={"temperature": info.temperature, "top_p": info.top_p},
        )
        previous_id = body.previous_response_id
        found = await decoded(http, body, decode, is_long=previous_id is not None)
        spec = found.reply
        if spec.store:
            store.check_room(stored(found.kept, response(spec, "queued"), previous_id))
        names = None if found.request.sampling.logprobs is None else self._engine.fronts[position].tokenizer
        submission = submit(self._engine, found.requests, http, spec)

        def keep(reply: ResponseReply) -> None:
            reply.completed_at = int(time.time()) if reply.status == "completed" else None
            if spec.store:
                store.put(stored(found.kept, reply, previous_id))

        if spec.background:
            return await self._in_background(http, store, submission, spec, keep, response_fold(spec, keep, names))
        return await respond_with(
            submission,
            http,
            spec,
            stream=lambda _: _KeptStream(spec, names, keep),
            fold=response_fold(spec, keep, names),
        )

    async def input_tokens(self, body: ResponsesBody, http: Request) -> Response:
        """Count the tokens of the prompt that a response to this body would have. Nothing is generated or stored."""
        (model, _), store = self._models.resolve(body.model), await self._store(http)
        request_id = record_of(http.scope).request_id
        decode = partial(
            _decoded,
            body,
            _referenced(body, store),
            _earlier(body, store),
            reply_id=request_id,
            model=model,
            created_at=0,
            searches=self._searches,
        )
        found = await decoded(http, body, decode, is_long=body.previous_response_id is not None)
        request = owned(found.request, http, model)
        return as_json(
            InputTokens(input_tokens=await while_connected(http.receive, self._engine.count_tokens(request)))
        )

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

    async def _in_background(
        self,
        http: Request,
        store: ResponseStore,
        submission: Submission,
        spec: ResponseSpec,
        keep: Keep,
        fold: ReplyFold,
    ) -> Response:
        """Store the response before it is submitted: if it cannot be stored, it is refused before anything runs."""
        answer = as_json(response(spec, "queued"))
        keep(response(spec, "in_progress"))
        starting = self._background.start(
            spec.reply_id,
            submission,
            fold,
            record_of(http.scope),
        )
        with ExitStack() as undone:
            undone.callback(store.remove, spec.reply_id)
            await while_connected(http.receive, starting)
            undone.pop_all()
        return answer


class _KeptStream(ResponseStream):
    """Keeps the response once it has ended. A client that disconnects leaves nothing."""

    def __init__(self, spec: ResponseSpec, names: TokenNames | None, keep: Keep) -> None:
        super().__init__(spec, names)
        self._keep = keep

    def fail(self, error: VLLMMLXError) -> bytes:
        wire = super().fail(error)
        self._keep(self.reply)
        return wire

    def close(self) -> bytes:
        keep, self._keep = self._keep, _drop  # if storing fails, `fail` follows, which must not try it again
        keep(self.reply)
        return super().close()


def _drop(reply: ResponseReply) -> None:
    """Store nothing."""


def _decoded(body: ResponsesBody, referenced: Stored, earlier: Sequence[StoredItem], **spec: Any) -> DecodedResponse:
    return decode_response(_resolved(body, referenced), earlier=as_input(earlier), **spec)


def _earlier(body: ResponsesBody, store: ResponseStore) -> Sequence[StoredItem]:
    previous_id = body.previous_response_id
    if previous_id is None:
        return []
    conversation = store.conversation(previous_id)
    previous = store.get(previous_id)
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
    found = store.get(response_id)
    if found is None:
        raise HTTPException(404, f"No response `{shown(response_id)}` is stored here.")
    return found
