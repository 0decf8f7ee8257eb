"""The status as a stream of events, for as long as somebody watches."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.errors import VLLMMLXError
from .error_handlers import ClientGone
from .streaming import while_connected


class StatusStream(Response):
    """An event at once and every `interval_s`; the last one, `event: error`, says why there are no more."""

    media_type = "text/event-stream"

    def __init__(self, ask: Callable[[], Awaitable[Mapping[str, Any]]], *, interval_s: float) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._ask = ask
        self._interval_s = interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(receive, self._stream(send))
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, send: Send) -> None:
        try:
            while True:
                await _write(send, "", await self._ask())
                await asyncio.sleep(self._interval_s)
        except VLLMMLXError as error:
            await _write(send, "event: error\n", {"message": error.message})


async def _write(send: Send, head: str, value: Mapping[str, Any]) -> None:
    body = f"{head}data: {json.dumps(value)}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
