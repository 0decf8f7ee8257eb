"""Writes one log line for each request, at its end, without any word of a prompt or a reply."""

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.errors import shown
from .error_handlers import CLIENT_GONE, internal_error
from .record import RequestRecord, cut, error_of, requests_logger
from .status import Recent
from .tenants import tenant_of

logger = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")


class RequestLog:
    """The outermost middleware: gives the request its id, writes its log line, and contains faults of the server."""

    def __init__(self, app: ASGIApp, *, recent: Recent) -> None:
        self._app = app
        self._recent = recent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope), scope["method"], cut(scope["path"]), time.monotonic())
        scope.setdefault("state", {})["record"] = record

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = (
                    record.request_id
                )  # OpenAI's and Anthropic's clients read different names
            await send(message)

        try:
            if _has_failed(record, await error_of(self._app(scope, receive, send_start))) and not record.status:
                await internal_error(record.path, record.request_id)(scope, receive, send_start)
        except asyncio.CancelledError:
            # Only the end of the server cancels a request. Its task ends here, without a stack trace in the log.
            record.error_code = "server_stopped"
        finally:
            record.key_name = scope["state"].get("key_name")
            self._note(record, tenant_of(scope))
            if not record.is_quiet:
                requests_logger.info("%s", record.line(time.monotonic()))

    def _note(self, record: RequestRecord, tenant: str) -> None:
        """Keep replies and errors for the status, except if the client left or asked for a path that is not ours."""
        if record.finish_reasons:
            self._recent.add_reply(record.last_reply(), tenant=tenant)
        failed = record.error_code is not None or record.status >= 400
        is_gone = record.status == CLIENT_GONE and record.error_code is None
        if failed and not is_gone and record.path.startswith("/v1/"):
            self._recent.add_error(
                {
                    "time": round(time.time(), 3),
                    "request_id": record.request_id,
                    "path": shown(record.path),
                    "status": record.status,
                    "code": record.error_code,
                    "message": record.error_message,
                },
                tenant=tenant,
            )


def _has_failed(record: RequestRecord, error: Exception | None) -> bool:
    """Whether there is an error, which is logged."""
    if error is None:
        return False
    logger.error("Request %s failed by an error of the server", record.request_id, exc_info=error)
    record.error_code = "internal_error"
    return True


def _request_id(scope: Scope) -> str:
    """The client's own id if it is fit for a log line, otherwise a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
