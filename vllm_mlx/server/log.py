"""Collects the facts about each request, and logs one line at its end, without any word of a prompt or a reply."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.replies import total_usage
from ..api.wire import UnknownFields
from ..core.errors import shown
from ..core.events import (
    Finished,
    GenerationEvent,
    PromptProgress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallStart,
    Usage,
)
from ..core.fence import Fence
from ..core.receipt import CacheReceipt, PromptChange, Shortfall
from .error_handlers import CLIENT_GONE, http_error
from .guards import tenant_of
from .prompt_batch import RequestGeneration
from .recorder import RequestRecorder
from .status import LastReply, Recent

logger = logging.getLogger(__name__)
requests_logger = logging.getLogger("vllm_mlx.requests")

RECEIPT_HEADER = "x-cache-receipt"
UNKNOWN_HEADER = "x-unknown-fields"
MAX_WARNINGS = 1000  # unknown fields that are logged; clients choose their names
PROGRESS_EVERY_S = 5.0
MAX_FIELD = 200  # characters of one field of a log line: clients choose paths and names of models
QUIET_PATHS = frozenset({"/health"})  # probed every few seconds
WATCHED_PATHS = frozenset(  # polled by monitors and the status page
    {"/metrics", "/v1/status", "/v1/status/stream", "/v1/status/history", "/v1/cache"}
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_FIRST_OUTPUT = (TextDelta, ReasoningDelta, ToolCallStart)


class RequestLog:
    """The outermost middleware: gives the request its id, writes its log line, and contains faults of the server."""

    def __init__(self, app: ASGIApp, *, recent: Recent, recorder: RequestRecorder | None = None) -> None:
        self._app = app
        self._recent = recent
        self._recorder = recorder
        self._unknown = UnknownFieldLog()

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
                # OpenAI's and Anthropic's clients read different names.
                headers["x-request-id"] = headers["request-id"] = record.request_id
                if record.unknown_fields.patterns:
                    headers[UNKNOWN_HEADER] = ", ".join(map(_as_header, record.unknown_fields.patterns))
            await send(message)

        try:
            if record.note_fault(await error_of(self._app(scope, receive, send_start))) and not record.status:
                message = f"The server failed on this request. See its log under {record.request_id}."
                await http_error(record.path, 500, message)(scope, receive, send_start)
        except asyncio.CancelledError:
            # Only the end of the server cancels a request. Its task ends here, without a stack trace in the log.
            record.error_code = "server_stopped"
        finally:
            record.key_name = scope["state"].get("key_name")
            self._note(record, tenant_of(scope))
            self._unknown.warn(Headers(scope=scope).get("user-agent", ""), record)
            body, record.body = record.body, None
            if self._recorder is not None and body is not None:
                self._recorder.offer(record.facts(time.monotonic()), Headers(scope=scope), body)
            if not record.is_quiet:
                requests_logger.info("%s", record.line(time.monotonic()))

    def _note(self, record: "RequestRecord", tenant: str) -> None:
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


class UnknownFieldLog:
    """Warns once of each field or tool that was left out, for each client that sent it."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str, str]] = set()

    def warn(self, user_agent: str, record: "RequestRecord") -> None:
        client = cut(user_agent) or "A client"
        for unknown in record.unknown_fields.patterns:
            about = (client, record.path, unknown)
            if about in self._warned or len(self._warned) >= MAX_WARNINGS:
                continue
            self._warned.add(about)
            logger.warning(
                "%s sent the field %s to %s, which this server does not know or cannot run: it was left out.%s",
                *(_quoted(text) for text in (client, unknown, record.path)),
                f" This is the last such warning of {MAX_WARNINGS}." if len(self._warned) == MAX_WARNINGS else "",
            )


def _as_header(field: str) -> str:
    """The name in the characters that a header may have. A long one is cut: clients accept 8 KiB of headers or more."""
    return quote(field, safe=".[]")[:MAX_FIELD]


def _request_id(scope: Scope) -> str:
    """The client's own id if it is fit for a log line, otherwise a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


class Receipts:
    """The cache receipts of one request. Each prompt has that of the choice that computed most, as usage counts."""

    def __init__(self, *, num_prompts: int = 1, choices_per_prompt: int = 1) -> None:
        self._num_prompts = num_prompts
        self._choices_per_prompt = choices_per_prompt
        self._seen_prompts: set[int] = set()
        self._by_prompt: dict[int, CacheReceipt] = {}

    def take(self, index: int, event: GenerationEvent) -> bool:
        """Take an event of the choice `index`. Returns whether every prompt has started or failed."""
        prompt = index // self._choices_per_prompt
        self._seen_prompts.add(prompt)
        if isinstance(event, Started) and event.receipt is not None:
            known = self._by_prompt.setdefault(prompt, event.receipt)
            if event.receipt.cached_tokens < known.cached_tokens:
                self._by_prompt[prompt] = event.receipt
        return len(self._seen_prompts) == self._num_prompts

    def total(self) -> CacheReceipt | None:
        """The receipt of the request; None until every prompt has one. Several prompts have no expected tokens."""
        receipts = list(self._by_prompt.values())
        if len(receipts) < self._num_prompts:
            return None
        if len(receipts) == 1:
            return receipts[0]
        return CacheReceipt(
            prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
            cached_tokens=sum(receipt.cached_tokens for receipt in receipts),
            stored_tokens=sum(receipt.stored_tokens for receipt in receipts),
            disk_tokens=sum(receipt.disk_tokens for receipt in receipts),
            hit_kind=",".join(dict.fromkeys(receipt.hit_kind for receipt in receipts)),
            cache_bytes=receipts[-1].cache_bytes,
            max_cache_bytes=receipts[-1].max_cache_bytes,
        )

    def headers(self) -> dict[str, str]:
        receipt = self.total()
        if receipt is None:
            return {}
        facts = f"prompt={receipt.prompt_tokens}; cached={receipt.cached_tokens}; expected={receipt.expected_tokens}"
        if receipt.tier is not None:
            facts += f"; tier={receipt.tier}"
        if receipt.disk_tokens:
            facts += f"; disk={receipt.disk_tokens}"
        if self._num_prompts > 1:
            facts += f"; prompts={self._num_prompts}"
        if receipt.shortfall is not None:
            facts += f'; reason={receipt.shortfall.value}; detail="{receipt.why}"'
        return {RECEIPT_HEADER: facts}


@dataclass(slots=True)
class RequestRecord:
    """Facts about one HTTP request so far. Times are seconds of the monotonic clock."""

    request_id: str
    method: str
    path: str
    started_s: float
    status: int = 0
    reply_id: str | None = None
    model: str | None = None
    key_name: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    first_output_s: float | None = None
    progress_logged_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_change: PromptChange | None = None
    receipts: Receipts = field(default_factory=Receipts)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    body: bytes | None = None  # until the request has ended
    finish_reasons: list[str] = field(default_factory=list)
    _choices_per_prompt: int = 1
    _usages: dict[int, Usage] = field(default_factory=dict)

    @property
    def is_quiet(self) -> bool:
        if self.method == "GET" and self.path in WATCHED_PATHS:
            return self.status < 400 or self.status == CLIENT_GONE
        return self.path in QUIET_PATHS

    def begin_reply(
        self,
        reply_id: str,
        model: str,
        generation: RequestGeneration,
        *,
        num_prompts: int,
        choices_per_prompt: int,
    ) -> None:
        self.reply_id, self.model = reply_id, model
        self.prompt_tokens, self.prompt_change = generation.num_prompt_tokens, generation.prompt_change
        self.receipts = Receipts(num_prompts=num_prompts, choices_per_prompt=choices_per_prompt)
        self._choices_per_prompt = choices_per_prompt

    @property
    def _receipt(self) -> CacheReceipt | None:
        return self.receipts.total()

    @property
    def _ttft_s(self) -> float | None:
        return None if self.first_output_s is None else round(self.first_output_s - self.started_s, 4)

    @property
    def _finish(self) -> str:
        return ",".join(dict.fromkeys(self.finish_reasons))

    def note_fault(self, error: Exception | None) -> bool:
        """Log an error of the server itself. Returns whether there is one."""
        if error is not None:
            logger.error("Request %s failed by an error of the server", self.request_id, exc_info=error)
            self.error_code = "internal_error"
        return error is not None

    def observe(self, index: int, event: GenerationEvent) -> None:
        if self.first_output_s is None and isinstance(event, _FIRST_OUTPUT):
            self.first_output_s = time.monotonic()
        if isinstance(event, PromptProgress):
            self._log_progress(event)
        if isinstance(event, Finished):
            self._usages[index] = event.usage
            self.finish_reasons.append(event.reason.value)
        elif isinstance(event, Started):
            self.cached_tokens = event.cached_tokens
            self.receipts.take(index, event)

    def last_reply(self) -> LastReply:
        """Describe the finished reply for the status."""
        usage, receipt = total_usage(self._usages, self._choices_per_prompt), self._receipt
        return {
            "time": round(time.time(), 3),
            "request_id": self.reply_id,
            "path": self.path,
            "model": self.model,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "ttft_s": self._ttft_s,
            "finish": self._finish,
            "disk_tokens": 0 if receipt is None else receipt.disk_tokens,
            "tier": None if receipt is None else receipt.tier,
            "expected_tokens": 0 if receipt is None else receipt.expected_tokens,
            "why": None if receipt is None else receipt.why,
        }

    def facts(self, ended_s: float) -> dict[str, Any]:
        """The facts that are recorded with the body of the request."""
        usage = total_usage(self._usages, self._choices_per_prompt) if self._usages else None
        response = {
            "status": self.status,
            "error": self.error_code,
            "message": self.error_message,
            "finish": self._finish or None,
            "prompt_tokens": self.prompt_tokens if usage is None else usage.prompt_tokens,
            "cached_tokens": self.cached_tokens if usage is None else usage.cached_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "reasoning_tokens": None if usage is None else usage.reasoning_tokens,
            "ttft_s": self._ttft_s,
            "duration_s": round(ended_s - self.started_s, 4),
            "unknown_fields": list(self.unknown_fields.patterns) or None,
        }
        given = {name: value for name, value in response.items() if value is not None}
        fault = self.status if self.status >= 400 else None
        return {"method": self.method, "endpoint": self.path, "fault": fault, "response": given}

    def _log_progress(self, event: PromptProgress) -> None:
        """Log the progress of a long prompt, every few seconds."""
        now = time.monotonic()
        if now - (self.progress_logged_s or self.started_s) < PROGRESS_EVERY_S:
            return
        self.progress_logged_s = now
        share = f"{event.num_computed_tokens}/{event.num_prompt_tokens}"
        requests_logger.info("id=%s prefill=%s elapsed_s=%.1f", self.request_id, share, now - self.started_s)

    def line(self, ended_s: float) -> str:
        usage = total_usage(self._usages, self._choices_per_prompt) if self._usages else None
        receipt = self._receipt
        facts: dict[str, Any] = {
            "id": self.request_id,
            "status": self.status,
            "method": self.method,
            "path": self.path,
            "key": self.key_name,
            "reply": self.reply_id,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens if usage is None else usage.prompt_tokens,
            "cached_tokens": self.cached_tokens if usage is None else usage.cached_tokens,
            "disk_tokens": (receipt and receipt.disk_tokens) or None,
            "hit": receipt and receipt.hit_kind,
            "cache_mb": _cache_mb(receipt),
            "expected_tokens": (receipt and receipt.expected_tokens) or None,
            "altered": self.prompt_change,
            # The shortfall of an altered prompt is said by `altered`.
            "not_cached": None if receipt is None or receipt.shortfall is Shortfall.ALTERED else receipt.why,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "reasoning_tokens": None if usage is None else usage.reasoning_tokens,
            "ttft_s": self._ttft_s,
            "duration_s": round(ended_s - self.started_s, 4),
            "prompt_tokens_per_s": self._prompt_tokens_per_s(usage),
            "tokens_per_s": self._tokens_per_s(usage, ended_s),
            "finish": self._finish or None,
            "error": self.error_code,
        }
        return " ".join(f"{name}={_quoted(value)}" for name, value in facts.items() if value is not None)

    def _prompt_tokens_per_s(self, usage: Usage | None) -> float | None:
        """The speed of computing tokens that were not cached, including the time in the queue."""
        if usage is None or self.first_output_s is None:
            return None
        return round((usage.prompt_tokens - usage.cached_tokens) / max(self.first_output_s - self.started_s, 1e-6), 1)

    def _tokens_per_s(self, usage: Usage | None, ended_s: float) -> float | None:
        """The speed of the tokens after the first, so that waiting and prefill do not count."""
        if usage is None or self.first_output_s is None or usage.completion_tokens < 2:
            return None
        return round((usage.completion_tokens - 1) / max(ended_s - self.first_output_s, 1e-6), 1)


def _cache_mb(receipt: CacheReceipt | None) -> str | None:
    """What the prefix cache held when the prompt was looked up, and what it may hold. None: there is no cache."""
    if receipt is None or not receipt.max_cache_bytes:
        return None
    return f"{receipt.cache_bytes / 1e6:.1f}/{receipt.max_cache_bytes / 1e6:.1f}"


def _quoted(value: object) -> str:
    text = cut(str(value))
    return text if re.fullmatch(r"[!#-<>-~]+", text) else ascii(text)


def cut(text: str) -> str:
    return text if len(text) <= MAX_FIELD else f"{text[:MAX_FIELD]}... ({len(text) - MAX_FIELD} characters more)"


async def error_of(work: Awaitable[None]) -> Exception | None:
    """The error that ends `work`, or None. Cancellation passes.

    Pass the error on and keep it in no variable: its frames lead to the caller's, and both would stay in memory until
    the next full garbage collection.
    """
    with Fence("every other request, and the server", is_logged=False) as fence:
        await work
    try:
        return fence.error
    finally:
        del fence


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope["state"]["record"]
    return record
