"""Request bodies: bounded while they arrive, read as wire types, and decoded into requests within the server's limits.

A `Call` carries a body from its route to the encoder of the reply.

This file alone chooses the thread: long bodies are read and decoded off the event loop, so as not to block it. Each
tenant has one of these threads at a time, and tenants take turns.
"""

import asyncio
import re
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from json import JSONDecodeError
from typing import Annotated, Any, Generic, Self, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.parameters import Decoded, PromptFields
from ..api.text import may_hold_sealed
from ..api.wire import UnknownFields
from ..core.encoding import Task
from ..core.errors import InvalidParameter, setting, shown
from ..core.request import RequestLimits
from ..engine.client import EngineClient
from ..engine.front import Front
from ..util.fair_queue import FairQueue, FairThreads
from ..util.tenants import has_room
from .config import ServerConfig
from .error_handlers import ENCODER_PATHS, ClientGone, http_error
from .guards import tenant_of
from .json_bytes import LARGE_BYTES, read_json
from .log import record_of

LEAST_BYTES_PER_S = 1024  # the lowest speed of a body that takes longer than `body_s`
BODIES = 4  # running requests may hold this many bodies of the largest size together
SMALL_BYTES = 64 * 1024  # a body of this size is always accepted
REST = 9  # after a long body, a key's next one waits 9 times its parse time: parsing holds the interpreter's lock
BUSY_S = 5  # `retry-after` if there is no room for a body
_BUSY = (
    f"The bodies of running requests take {BODIES} times {setting('max_body')} together, which is the maximum. "
    "Try again when some of these requests have ended."
)
# A web page may send other types, or none, to any address without permission: see `fetch` with `mode: "no-cors"`.
_JSON_TYPE = re.compile(r"\s*application/([^/;]+\+)?json\s*(;|\Z)", re.IGNORECASE)
_NOT_JSON = "Send the request body as JSON, with the header `Content-Type: application/json`."
_ENCODED = "The request body has the header `Content-Encoding`. Send it uncompressed, without this header."

_QUEUED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", *ENCODER_PATHS})
_WORK: Mapping[Task, str] = {"chat": "writes texts", "embedding": "computes embeddings", "rerank": "ranks documents"}

T = TypeVar("T")
B = TypeVar("B", bound=PromptFields)
D = TypeVar("D", bound=Decoded[Any])


def body_turns() -> FairQueue:
    """Make the queue in which each key has one place, for its long body and the rest after it."""
    return FairQueue(sys.maxsize, per_key=1)


class BodyLimit:
    """Refuses bodies that are too long, too slow, or too many before they fill the memory.

    The declared length is trusted only to refuse early; bytes are counted as they arrive.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_s: float) -> None:
        """Limit bodies. `body_s`: seconds for a body to arrive, again after each `LEAST_BYTES_PER_S * body_s` bytes."""
        self._app = app
        self.max_body_bytes = max_body_bytes
        self.body_s = body_s
        self._held: Counter[str] = Counter()  # bytes of the bodies of running requests, by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_body_bytes:
            await http_error(scope, 413, _too_long(self.max_body_bytes))(scope, receive, send)
            return
        tenant = tenant_of(scope)
        body = _Body(receive, self, tenant)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._held[tenant] -= body.num_bytes
            if not self._held[tenant]:
                del self._held[tenant]

    def hold(self, tenant: str, num_bytes: int) -> bool:
        """Count the bytes. Return whether there was room for them, or the tenant has no more than its share."""
        is_room = has_room(self._held, tenant, num_bytes, BODIES * self.max_body_bytes)
        self._held[tenant] += num_bytes
        return is_room


class _Body:
    """A body while it arrives."""

    def __init__(self, receive: Receive, limit: BodyLimit, tenant: str) -> None:
        self._receive = receive
        self._limit = limit
        self._tenant = tenant
        self._deadline_s: float | None = None
        self._num_recent = 0  # bytes since the deadline was set
        self._is_complete = False
        self.num_bytes = 0

    async def receive(self) -> Message:
        """Receive a message. Raises HTTPException if the body is too long or too slow, or there is no room for it."""
        if self._is_complete:
            return await self._receive()  # returns when the client disconnects
        message = await self._in_time()
        num_new = len(message.get("body", b""))
        self.num_bytes += num_new
        self._num_recent += num_new
        is_room = self._limit.hold(self._tenant, num_new)
        self._is_complete = not message.get("more_body", False)
        if self.num_bytes > self._limit.max_body_bytes:
            raise HTTPException(413, _too_long(self._limit.max_body_bytes))
        if not is_room and self.num_bytes > SMALL_BYTES:
            raise HTTPException(429, _BUSY, {"retry-after": str(BUSY_S), "connection": "close"})
        return message

    async def _in_time(self) -> Message:
        now = time.monotonic()
        if self._deadline_s is None or self._num_recent >= LEAST_BYTES_PER_S * self._limit.body_s:
            self._deadline_s, self._num_recent = now + self._limit.body_s, 0
        try:
            return await asyncio.wait_for(self._receive(), max(0.0, self._deadline_s - now))
        except TimeoutError:
            raise HTTPException(408, "The request body came too slowly.", {"connection": "close"}) from None


def _too_long(max_bytes: int) -> str:
    return f"The request body is larger than {max_bytes} bytes ({setting('max_body')})."


class JSONRoute(APIRoute):
    """A route that reads its body itself. FastAPI's own validation accepts the finished instance unchanged."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        info = self.body_field.field_info
        form: Any = Annotated[info.annotation, info]  # `info` has the discriminator of a union
        wire: TypeAdapter[Any] = TypeAdapter(form)

        async def handle(request: Request) -> Response:
            if not _JSON_TYPE.match(request.headers.get("content-type", "")):
                raise HTTPException(400, _NOT_JSON)
            if request.headers.get("content-encoding", "identity") != "identity":
                raise HTTPException(415, _ENCODED)
            await _check_queue(request)
            read = await _JSONRequest.read(request, wire)
            if (found := request.app.state.found) is not None and await read.body():
                await found.need((await read.json()).model)
            return await handler(read)

        return handle


class _JSONRequest(Request):
    """A request whose JSON is a wire type."""

    _wire: Any = None
    is_long = False  # a thread reads and decodes the body

    @classmethod
    async def read(cls, request: Request, wire: TypeAdapter[Any]) -> "_JSONRequest":
        """Read the body. Raises HTTPException, RequestValidationError, ClientGone, and InvalidParameter for a limit."""
        found = cls(request.scope, request.receive)
        try:
            if body := await found.body():  # FastAPI names the fields that an empty one lacks
                config, record = request.app.state.config, record_of(request.scope)
                if config.record_requests is not None:
                    record.body = body
                record.unknown_fields = unknown = UnknownFields(drops=config.unknown_fields == "warn")
                read = partial(_read, body, wire, config.limits, unknown)
                found.is_long = len(body) >= LARGE_BYTES or may_hold_sealed(body)
                found._wire = await _in_turn(found, read)
                found._body = b"read"  # the request lasts until its reply has ended, and its bytes need not
        except ClientDisconnect:
            raise ClientGone from None
        except JSONDecodeError as error:
            raise HTTPException(400, f"The request body is not valid JSON: {error.msg}.") from None
        return found

    async def json(self) -> Any:
        return self._wire


@dataclass(frozen=True, slots=True)
class Call(ABC, Generic[B, D]):
    """A body with all that decoding needs. `model`: the name that the client asked for, or the default's."""

    body: B
    model: str
    front: Front
    config: ServerConfig

    @classmethod
    def of(cls, body: B, engine: EngineClient, config: ServerConfig, **more: Any) -> Self:
        """Make the call for the model that the body names, else for the first model of this task.

        Raises ModelNotFound, and InvalidParameter for a model of another task.
        """
        entries = zip(config.models.entries, engine.fronts, strict=True)
        fitting = [entry.name for entry, front in entries if front.info.task == body.task]
        model, position = config.models.resolve(fitting[0] if body.model is None and fitting else body.model)
        front = engine.fronts[position]
        if front.info.task != body.task:
            fitting = fitting or config.models.of_task(body.task)
            raise InvalidParameter(_other_task(model, front.info.task, body.task, fitting), param="model")
        return cls(body, model, front, config, **more)

    @property
    def searches(self) -> bool:
        return self.config.web_search is not None

    @property
    def is_long(self) -> bool:
        """Return whether decoding takes long even for a short body."""
        return False

    @abstractmethod
    def decode(self) -> D:
        """Return the requests of the body. Any thread may call this, once. Raises InvalidParameter."""

    def checked(self) -> D:
        """Decode and check the requests, then empty the body, which FastAPI holds until the reply has ended."""
        limits = self.config.limits
        try:
            found = self.decode()
            limits.check_choices(sum(request.sampling.n for request in found.requests))
            for request in found.requests:
                limits.check(request)
            return found
        finally:
            vars(self.body).clear()


async def decoded(http: Request, call: Call[B, D]) -> D:
    """Decode the call: on a thread if the body is long, or may unpack to a long one. Raises InvalidParameter."""
    if call.is_long or (isinstance(http, _JSONRequest) and http.is_long):
        return await _THREADS.run(call.checked, tenant_of(http.scope), is_first=True)
    return call.checked()


async def _check_queue(http: Request) -> None:
    """Refuse a request that would get no place in the admission queue, before work for its body.

    Raises TooManyRequests.
    """
    if http.url.path in _QUEUED:
        await http.app.state.queue.check(tenant_of(http.scope), max(1, len(http.app.state.config.models.entries)))


async def _in_turn(http: _JSONRequest, work: Callable[[], T]) -> T:
    """Read a body. If keys share the server, a key rests after a long body before its next long one is read."""
    await _check_queue(http)  # requests that came while the body arrived
    if not http.is_long:
        return work()
    loop, tenant, has_begun = asyncio.get_running_loop(), tenant_of(http.scope), False
    share = REST if len(http.app.state.config.api_keys) > 1 else 0

    def timed() -> T:
        nonlocal has_begun
        has_begun, started_s = True, time.thread_time()
        try:
            return work()
        finally:
            rest_s = share * (time.thread_time() - started_s)
            loop.call_soon_threadsafe(loop.call_later, rest_s, place.leave)

    place = await http.app.state.body_turns.enter(tenant)
    try:
        return await _THREADS.run(timed, tenant)
    finally:
        if not has_begun:
            place.leave()


def _other_task(model: str, task: Task, wanted: Task, fitting: Sequence[str]) -> str:
    """Describe the model's other task, and name this server's models of the wanted task."""
    known = ", ".join(f"`{name}`" for name in fitting)
    advice = f"Here {known} can" if known else "None of this server's models can: start it with one more model"
    return f"The model `{shown(model)}` {_WORK[task]}, and this endpoint needs one that {_WORK[wanted]}. {advice}."


def _read(body: bytes, wire: TypeAdapter[Any], limits: RequestLimits, unknown: UnknownFields) -> Any:
    value = read_json(body)
    _check_lengths(value, limits)
    try:
        return wire.validate_python(value, context=unknown)
    except ValidationError as error:
        errors = [{**found, "loc": ("body", *found["loc"])} for found in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=value) from None


def _check_lengths(value: Any, limits: RequestLimits) -> None:
    """Refuse bodies early that decoding would refuse only after much work."""
    match value:
        case {"messages": list(messages)}:
            limits.check_messages(len(messages))
        case {"prompt": [str() | list(), *_] as prompts}:
            limits.check_choices(len(prompts))
        case {"input": [str() | list(), *_] as texts}:
            limits.check_texts(len(texts), "input")
        case {"documents": list(documents)}:
            limits.check_texts(len(documents), "documents")


# A body is read under the interpreter's lock, so each key has one thread at a time. Bodies that were read are decoded
# before others are read, since wire types take many times the memory of their text.
_THREADS = FairThreads(2, "bodies", per_key=1)
