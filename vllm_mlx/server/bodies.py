"""Request bodies → wire types. One thread reads long bodies, so that they do not block the event loop."""

import asyncio
import itertools
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from queue import PriorityQueue
from typing import Any, TypeVar, cast

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.responses import Response

from ..api.sealed import may_hold_sealed
from ..core.errors import RequestError
from ..core.request import RequestLimits
from ..core.tasks import settle
from .json_bytes import LARGE_BYTES, read_json

T = TypeVar("T")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]

# A web page may send other types, or none, to any address without permission: see `fetch` with `mode: "no-cors"`.
_JSON_TYPE = re.compile(r"\s*application/([^/;]+\+)?json\s*(;|\Z)", re.IGNORECASE)
_NOT_JSON = "Send the request body as JSON, with the header `Content-Type: application/json`."


class _Worker:
    """One thread, so that the event loop never waits for the interpreter's lock behind several threads.

    Bodies that were read are decoded before others are read, since wire types take many times the memory of their text.
    """

    def __init__(self) -> None:
        self._jobs: PriorityQueue[tuple[bool, int, Future[Any], Callable[[], Any]]] = PriorityQueue()
        self._numbers = itertools.count()
        threading.Thread(target=self._run, name="bodies", daemon=True).start()

    async def run(self, work: Callable[[], T], *, is_reading: bool) -> T:
        result: Future[T] = Future()
        self._jobs.put((is_reading, next(self._numbers), result, work))
        return await asyncio.wrap_future(result)

    def _run(self) -> None:
        while True:
            settle(*self._jobs.get()[2:])


_WORKER = _Worker()


class RefusedBody(HTTPException):
    """The only exception that FastAPI passes on while it reads a body."""

    def __init__(self, error: RequestError | RequestValidationError) -> None:
        super().__init__(400)
        self.error = error


class JSONRoute(APIRoute):
    """A route that reads its body itself. FastAPI's own validation accepts the finished instance unchanged."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()
        field = self.body_field
        wire: TypeAdapter[Any] | None = None if field is None else TypeAdapter(cast(Any, field.field_info.annotation))

        async def handle(request: Request) -> Response:
            if wire is not None and not _JSON_TYPE.match(request.headers.get("content-type", "")):
                raise HTTPException(400, _NOT_JSON)
            return await handler(_JSONRequest(request, wire))

        return handle


class _JSONRequest(Request):
    def __init__(self, request: Request, wire: TypeAdapter[Any] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._wire = wire

    async def json(self) -> Any:
        assert self._wire is not None, "only the routes that declare a body read one"
        body = await self.body()
        try:
            read = partial(_read, body, self._wire, self.app.state.limits)
            return await beside_loop(self, read, is_reading=True)
        except (RequestError, RequestValidationError) as error:
            raise RefusedBody(error) from None


async def decoded(http: Request, wire: BaseModel, decode: Callable[[], T], *, is_long: bool = False) -> T:
    """Run `decode`, then empty `wire`, which FastAPI holds until the reply has ended."""
    return await beside_loop(http, partial(_decode, wire, decode), is_long=is_long)


def _decode(wire: BaseModel, decode: Callable[[], T]) -> T:
    try:
        return decode()
    finally:
        vars(wire).clear()


async def beside_loop(http: Request, work: Callable[[], T], *, is_long: bool = False, is_reading: bool = False) -> T:
    """Run `work` on the thread for bodies if the body is long, may unpack to a long one, or `is_long` is true."""
    body = await http.body()
    if is_long or len(body) >= LARGE_BYTES or may_hold_sealed(body):
        return await _WORKER.run(work, is_reading=is_reading)
    return work()


def _read(body: bytes, wire: TypeAdapter[Any], limits: RequestLimits) -> Any:
    value = read_json(body)
    _check_lengths(value, limits)
    try:
        return wire.validate_python(value)
    except ValidationError as error:
        errors = [{**found, "loc": ("body", *found["loc"])} for found in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=value) from None


def _check_lengths(value: Any, limits: RequestLimits) -> None:
    """Refuse early what decoding would refuse only after much work."""
    match value:
        case {"messages": list(messages)}:
            limits.check_messages(len(messages))
        case {"prompt": [str() | list(), *_] as prompts}:
            limits.check_choices(len(prompts))
