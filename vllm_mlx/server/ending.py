"""Ends requests with the server: one that has no reply yet gets 503 in its protocol, and may be sent again."""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import ShuttingDown
from .error_handlers import envelope_of, respond
from .log import RequestRecord, record_of


class OpenRequests:
    """The requests that run now, for the end of the server."""

    def __init__(self) -> None:
        self._records: dict[asyncio.Task[object], RequestRecord] = {}

    def add(self, task: "asyncio.Task[object]", record: RequestRecord) -> None:
        self._records[task] = record
        task.add_done_callback(lambda done: self._records.pop(done, None))

    def refuse(self) -> None:
        """Cancel the requests without a reply: their bodies arrive or are read, or their prompts are prepared."""
        for task, record in self._records.items():
            if record.reply_id is None and not record.status:
                task.cancel()


class EndMiddleware:
    """Answers a cancelled request, since only the end of the server cancels one."""

    def __init__(self, app: ASGIApp, requests: OpenRequests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        self._requests.add(task, record)
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if record.status:
                raise
            error = envelope_of(scope["path"]).error(ShuttingDown())
            record.error_code, record.error_message = error.code, error.body.error.message
            response = respond(error)
            response.headers["connection"] = "close"
            await response(scope, receive, send)
