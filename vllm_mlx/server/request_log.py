"""The outermost middleware: ids, log lines, records and status of requests, and their end with the server."""

import asyncio
import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.error_replies import UNKNOWN_PARAMETER
from ..core.errors import ShuttingDown, setting, shown
from .error_handlers import REPLY_PATHS, envelope_of, http_error, respond
from .guards import tenant_of
from .log import MAX_FIELD, RequestRecord, cut, error_of, quoted, requests_logger
from .recorder import RequestRecorder
from .status import Recent

logger = logging.getLogger(__name__)

UNKNOWN_HEADER = "x-unknown-fields"
MAX_WARNINGS = 1000  # unknown fields that are logged; clients choose their names
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")


class RequestLog:
    """The outermost middleware: gives the request its id, writes its log line, and contains faults of the server."""

    def __init__(
        self, app: ASGIApp, *, recent: Recent, requests: "OpenRequests", recorder: RequestRecorder | None = None
    ) -> None:
        self._app = app
        self._recent = recent
        self._requests = requests
        self._recorder = recorder
        self._has_hinted = False  # whether the log has said how unknown fields are allowed
        self._warned: set[tuple[str, str, str]] = set()  # clients, paths, and fields that were left out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, client = cut(scope["path"]), _client(scope)
        record = RequestRecord(_request_id(scope), scope["method"], path, time.monotonic(), client)
        scope.setdefault("state", {})["record"] = record
        self._requests.add(record)

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                headers = MutableHeaders(scope=message)
                # OpenAI's and Anthropic's clients read different names.
                headers["x-request-id"] = headers["request-id"] = record.request_id
                if record.unknown_fields.patterns:
                    headers[UNKNOWN_HEADER] = ", ".join(map(_as_header, record.unknown_fields.patterns))
            await send(message)

        try:
            if record.note_fault(await error_of(self._app(scope, receive, send_start))) and not record.status:
                message = f"The server failed on this request. See its log under {record.request_id}."
                await http_error(scope, 500, message)(scope, receive, send_start)
        except asyncio.CancelledError:
            # Only the end of the server cancels a request. Its task ends here, without a stack trace in the log.
            if record.status:
                record.error_code = "server_stopped"
            else:
                await _refuse(record, scope, receive, send_start)
        finally:
            record.key_name = scope["state"].get("key_name")
            ended_s = time.monotonic()
            self._note(record, ended_s, tenant_of(scope))
            self._warn(record)
            body, record.body = record.body, None
            line = record.line(ended_s)
            if self._recorder is not None and body is not None:
                self._recorder.offer(record.facts(line), Headers(scope=scope), body)
            if not record.is_quiet:
                requests_logger.log(record.level, "%s", line, extra={"row": record.row(ended_s)})

    def _note(self, record: RequestRecord, ended_s: float, tenant: str) -> None:
        """Keep replies and errors for the status.

        Clients that left, unknown paths and watchers, such as the page before it has a key, do not count as errors.
        """
        if record.finish_reasons or record.is_cut:
            self._recent.add_reply(record.last_reply(ended_s), tenant=tenant)
        failed = record.error_code is not None or record.status >= 400
        if failed and not record.is_left and not record.is_watching and record.path.startswith(("/v1/", *REPLY_PATHS)):
            self._recent.add_error(
                {
                    "time": round(time.time(), 3),
                    "request_id": record.request_id,
                    "client": record.client,
                    "path": shown(record.path),
                    "status": record.status,
                    "code": record.error_code,
                    "message": record.error_message,
                },
                tenant=tenant,
            )

    def _warn(self, record: RequestRecord) -> None:
        """Warn once of each field or tool that was left out, for each client that sent it."""
        client = record.client or "A client"
        if record.error_code == UNKNOWN_PARAMETER and not self._has_hinted:
            self._has_hinted = True
            logger.warning(
                "A field that this server does not know was refused: %s To leave such fields out instead, start the "
                "server with %s warn.", quoted(record.error_message or ""), setting("unknown_fields"),
            )  # fmt: skip
        for unknown in record.unknown_fields.patterns:
            about = (client, record.path, unknown)
            if about in self._warned or len(self._warned) >= MAX_WARNINGS:
                continue
            self._warned.add(about)
            logger.warning(
                "%s sent the field %s to %s, which this server does not know or cannot run: it was left out.%s",
                *(quoted(text) for text in (client, unknown, record.path)),
                f" This is the last such warning of {MAX_WARNINGS}." if len(self._warned) == MAX_WARNINGS else "",
            )


async def _refuse(record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request to which the server has not replied before its end, so that the client may send it again."""
    error = envelope_of(scope["path"]).error(ShuttingDown())
    record.error_code, record.error_message = error.code, error.body.error.message
    response = respond(error, scope)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


class OpenRequests:
    """The requests that run now, for the end of the server."""

    def __init__(self) -> None:
        self._records: dict[asyncio.Task[object], RequestRecord] = {}

    def add(self, record: RequestRecord) -> None:
        """Add the request of the present task."""
        task = asyncio.current_task()
        assert task is not None, "an application runs in a task"
        self._records[task] = record
        task.add_done_callback(lambda done: self._records.pop(done, None))

    def refuse(self) -> None:
        """Cancel the requests without a reply: their bodies arrive or are read, or their prompts are prepared."""
        for task, record in self._records.items():
            if record.reply_id is None and not record.status:
                task.cancel()


def _as_header(field: str) -> str:
    """Return the name in the characters of a header. It is cut, since some clients accept 8 KiB of headers at most."""
    return quote(field, safe=".[]")[:MAX_FIELD]


def _client(scope: Scope) -> str | None:
    """Return the user agent, cut and without control characters, or None if the client sent none."""
    agent = cut(Headers(scope=scope).get("user-agent", ""))
    return "".join(filter(str.isprintable, agent)).strip() or None


def _request_id(scope: Scope) -> str:
    """Return the client's own id if it is fit for a log line, otherwise a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
