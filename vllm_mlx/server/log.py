"""One log line for each request, at its end. Never a word of a prompt or a reply."""

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.usage import UsageTally
from ..core.events import (
    Finished,
    GenerationEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallStart,
    Usage,
)
from .errors import internal_error

requests_logger = logging.getLogger("vllm_mlx.requests")
logger = logging.getLogger(__name__)

QUIET_PATHS = frozenset({"/health"})  # probed every few seconds


_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_FIRST_OUTPUT = (TextDelta, ReasoningDelta, ToolCallStart)


@dataclass(slots=True)
class RequestRecord:
    """What is known of one HTTP request so far. Times are in seconds of the monotonic clock."""

    request_id: str
    method: str
    path: str
    started_s: float
    status: int = 0
    reply_id: str | None = None
    model: str | None = None
    error_code: str | None = None
    first_output_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    _tally: UsageTally | None = None

    def begin_reply(self, *, reply_id: str, model: str, prompt_tokens: int, choices_per_prompt: int) -> None:
        self.reply_id = reply_id
        self.model = model
        self.prompt_tokens = prompt_tokens
        self._tally = UsageTally(choices_per_prompt)

    def observe(self, index: int, event: GenerationEvent) -> None:
        if self.first_output_s is None and isinstance(event, _FIRST_OUTPUT):
            self.first_output_s = time.monotonic()
        if isinstance(event, Finished):
            assert self._tally is not None, "events come after begin_reply"
            self._tally.add(index, event.usage)
            self.finish_reasons.append(event.reason.value)
        elif isinstance(event, Started):
            self.cached_tokens = event.cached_tokens

    def line(self, ended_s: float) -> str:
        usage = self._tally.total() if self._tally is not None and self.finish_reasons else None
        facts: dict[str, Any] = {
            "id": self.request_id,
            "status": self.status,
            "method": self.method,
            "path": self.path,
            "reply": self.reply_id,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens if usage is None else usage.prompt_tokens,
            "cached_tokens": self.cached_tokens if usage is None else usage.cached_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "reasoning_tokens": None if usage is None else usage.reasoning_tokens,
            "ttft_s": None if self.first_output_s is None else round(self.first_output_s - self.started_s, 4),
            "duration_s": round(ended_s - self.started_s, 4),
            "tokens_per_s": self._tokens_per_s(usage, ended_s),
            "finish": ",".join(dict.fromkeys(self.finish_reasons)) or None,
            "error": self.error_code,
        }
        return " ".join(f"{name}={_quoted(value)}" for name, value in facts.items() if value is not None)

    def _tokens_per_s(self, usage: Usage | None, ended_s: float) -> float | None:
        """Of the tokens after the first, so that waiting and prefill do not count."""
        if usage is None or self.first_output_s is None or usage.completion_tokens < 2:
            return None
        return round((usage.completion_tokens - 1) / max(ended_s - self.first_output_s, 1e-6), 1)


def _quoted(value: object) -> str:
    text = str(value)
    return text if re.fullmatch(r"[!#-<>-~]+", text) else ascii(text)


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope["state"]["record"]
    return record


class RequestLog:
    """Outermost middleware: gives the request its id, writes its line, and fences off our own bugs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope), scope["method"], scope["path"], time.monotonic())
        scope.setdefault("state", {})["record"] = record

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_start)
        except asyncio.CancelledError:
            # Only the end of the server cancels a request, and its task ends here: passing it on is a stack trace.
            record.error_code = "server_stopped"
        except Exception:
            logger.exception("Request %s failed by an error of the server", record.request_id)
            record.error_code = "internal_error"
            if not record.status:
                await internal_error(record.path, record.request_id)(scope, receive, send_start)
        finally:
            if record.path not in QUIET_PATHS:
                requests_logger.info("%s", record.line(time.monotonic()))


def _request_id(scope: Scope) -> str:
    """The client's own, if it is fit for a log line."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
