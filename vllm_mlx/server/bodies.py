"""Request bodies → JSON. Images make them long, and the event loop waits while one is parsed."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

LARGE_BYTES = 256 * 1024
MAX_DEPTH = 128  # of objects and lists in each other: what walks over them recurses

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JSONRoute(APIRoute):
    """A route whose body is read by `parse`."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JSONRequest(request.scope, request.receive))

        return handle


class _JSONRequest(Request):
    async def json(self) -> Any:
        body = parse(await self.body())
        if is_deeper(body, MAX_DEPTH):
            raise HTTPException(400, f"The request body nests too deep: at most {MAX_DEPTH} levels are taken.")
        return body


def parse(body: bytes) -> Any:
    """As `json.loads` in all that it takes and raises; a long one several times as fast."""
    if len(body) >= LARGE_BYTES:
        try:
            return from_json(body, cache_strings="keys")
        except ValueError:  # half a surrogate pair, another encoding, or no JSON: the other parser's to judge
            pass
    return json.loads(body)


def is_deeper(value: Any, max_depth: int) -> bool:
    """Level by level, so that this itself needs no stack."""
    level = [value]
    for _ in range(max_depth + 1):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inside:
            return False
        level = [each for part in inside for each in part if isinstance(each, dict | list)]
    return True
