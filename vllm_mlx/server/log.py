"""The facts about one request and its line in the log, which has no word of a prompt or a reply."""

import logging
import re
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from ..api.replies import total_usage
from ..api.wire import UnknownFields
from ..core.events import (
    Finished,
    GenerationEvent,
    PromptProgress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallStart,
    Usage,
    Vectors,
    Written,
)
from ..core.receipt import CacheReceipt, PromptChange, Shortfall
from ..util.fence import Fence
from ..util.urls import client_name, endpoint_name
from .error_handlers import CLIENT_GONE
from .generations import RequestGeneration
from .schema import LastReply

logger = logging.getLogger(__name__)
requests_logger = logging.getLogger("vllm_mlx.requests")

RECEIPT_HEADER = "x-cache-receipt"
PROGRESS_EVERY_S = 5.0
MAX_FIELD = 200  # characters of one field of a log line: clients choose paths and names of models
QUIET_PATHS = frozenset({"/health"})  # probed every few seconds
WATCHED_PATHS = frozenset(  # polled by monitors and the status page
    {"/metrics", "/v1/status", "/v1/status/stream", "/v1/status/history", "/v1/cache"}
)
_PAGE = re.compile(r"/|/page/.*|/favicon\.ico|/apple-touch-icon.*|/\.well-known/appspecific/.*")  # asked by browsers
_FIRST_OUTPUT = (TextDelta, ReasoningDelta, ToolCallStart, Vectors)


class Receipts:
    """The cache receipts of one request. For n > 1, a prompt keeps the receipt with the fewest cached tokens."""

    def __init__(self, *, num_prompts: int = 1, choices_per_prompt: int = 1) -> None:
        self._num_prompts = num_prompts
        self.choices_per_prompt = choices_per_prompt
        self._seen_prompts: set[int] = set()
        self._by_prompt: dict[int, CacheReceipt] = {}

    def take(self, index: int, event: GenerationEvent) -> bool:
        """Take an event of the choice `index`. Returns whether every prompt has started or failed."""
        prompt = index // self.choices_per_prompt
        self._seen_prompts.add(prompt)
        if isinstance(event, Started) and event.receipt is not None:
            known = self._by_prompt.setdefault(prompt, event.receipt)
            if event.receipt.cached_tokens < known.cached_tokens:
                self._by_prompt[prompt] = event.receipt
        return len(self._seen_prompts) == self._num_prompts

    def total(self) -> CacheReceipt | None:
        """Return the receipt of the request, or None until every prompt has one. A sum has no expected tokens."""
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
            ahead_tokens=sum(receipt.ahead_tokens for receipt in receipts),
            hit=",".join(dict.fromkeys(receipt.hit for receipt in receipts)),
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
        if receipt.ahead_tokens:
            facts += f"; ahead={receipt.ahead_tokens}"
        if self._num_prompts > 1:
            facts += f"; prompts={self._num_prompts}"
        if receipt.template:
            facts += f'; template="{", ".join(receipt.template)}"'
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
    client: str | None = None  # its user agent
    status: int = 0
    reply_id: str | None = None
    model: str | None = None  # the requested name
    served_by: str | None = None  # the first name of that model
    key_name: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    first_output_s: float | None = None
    progress_logged_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    num_inputs: int | None = None  # of a request to an encoder
    prompt_change: PromptChange | None = None
    receipts: Receipts = field(default_factory=Receipts)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    body: bytes | None = None  # until the request has ended
    finish_reasons: list[str] = field(default_factory=list)
    num_choices: int = 0  # once the reply has begun
    _usages: dict[int, Usage] = field(default_factory=dict)
    _written: list[Written] = field(default_factory=list)

    @property
    def is_watching(self) -> bool:
        return self.method == "GET" and self.path in WATCHED_PATHS

    @property
    def is_quiet(self) -> bool:
        if self.is_watching:
            return self.status < 400 or self.status == CLIENT_GONE
        return self.path in QUIET_PATHS

    @property
    def level(self) -> int:
        """Return the level of the log line. Files that browsers fetch with the page are for debug."""
        is_page = self.method in ("GET", "HEAD") and _PAGE.fullmatch(self.path) is not None
        return logging.DEBUG if is_page and (self.status < 400 or self.status in (404, CLIENT_GONE)) else logging.INFO

    def begin_reply(
        self, reply_id: str, model: str, generation: RequestGeneration, *, num_prompts: int, choices_per_prompt: int
    ) -> None:
        self.reply_id, self.model = reply_id, model
        self.prompt_tokens, self.prompt_change = generation.num_prompt_tokens, generation.prompt_change
        self.receipts = Receipts(num_prompts=num_prompts, choices_per_prompt=choices_per_prompt)
        self.num_choices = num_prompts * choices_per_prompt

    @property
    def is_left(self) -> bool:
        """Return whether the client has left. Nothing else failed."""
        return self.status == CLIENT_GONE and self.error_code is None

    @property
    def is_cut(self) -> bool:
        """Return whether the client has left before the end of its reply."""
        return self.is_left and len(self.finish_reasons) < self.num_choices

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
            if event.written is not None:
                self._written.append(event.written)

    def last_reply(self, ended_s: float) -> LastReply:
        """Describe the reply that has ended, for the status."""
        usage, receipt = total_usage(self._usages, self.receipts.choices_per_prompt), self.receipts.total()
        if self.is_cut:
            num_written = sum(written.completion_tokens for written in self._written)
            prompt, cached = self.prompt_tokens or 0, self.cached_tokens or 0
            usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=num_written)
        return {
            "time": round(time.time(), 3),
            "request_id": self.reply_id,
            "client": self.client,
            "path": self.path,
            "model": self.model,
            "served_by": self.served_by,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "ttft_s": self._ttft_s,
            "duration_s": round(ended_s - self.started_s, 4),
            "tokens_per_s": self._tokens_per_s(usage, ended_s),
            "finish": ",".join(filter(None, (self._finish, "left" if self.is_cut else ""))),
            "disk_tokens": 0 if receipt is None else receipt.disk_tokens,
            "tier": None if receipt is None else receipt.tier,
            "expected_tokens": 0 if receipt is None else receipt.expected_tokens,
            "why": None if receipt is None else receipt.why,
        }

    def facts(self, line: str) -> dict[str, Any]:
        """Return the facts recorded with the body of the request, without the words that an error quotes."""
        message = self.error_message and re.sub(r"(['`\"]).*?\1", r"\1…\1", self.error_message, flags=re.DOTALL)
        fault = self.status if self.status >= 400 else None
        return {"method": self.method, "endpoint": self.path, "fault": fault, "message": message, "log": line}

    def _log_progress(self, event: PromptProgress) -> None:
        """Log the progress of a long prompt, every few seconds."""
        now = time.monotonic()
        if now - (self.progress_logged_s or self.started_s) < PROGRESS_EVERY_S:
            return
        self.progress_logged_s = now
        share = f"{event.num_computed_tokens}/{event.num_prompt_tokens}"
        elapsed_s, done = now - self.started_s, event.num_computed_tokens
        row = f"{self._asked} · reading {done:,} of {event.num_prompt_tokens:,} · {elapsed_s:.1f} s"
        requests_logger.info("id=%s prefill=%s elapsed_s=%.1f", self.request_id, share, elapsed_s, extra={"row": row})

    @property
    def _asked(self) -> str:
        path = quoted(self.path)
        what = endpoint_name(path) if self.method == "POST" else f"{self.method} {path}"
        return f"{what} {client_name(self.client)}"

    def row(self, ended_s: float) -> str:
        """Describe the request in a short line for a terminal."""
        usage = total_usage(self._usages, self.receipts.choices_per_prompt) if self._usages else None
        facts, speed = [self._asked], self._tokens_per_s(usage, ended_s)
        if usage is not None:
            cached = f"({usage.cached_tokens:,} cached)"
            out = f"{usage.completion_tokens:,} out" if self.num_inputs is None else f"{self.num_inputs:,} texts"
            facts += [f"{usage.prompt_tokens:,} in {cached}", out]
        facts += [f"{ended_s - self.started_s if self._ttft_s is None else self._ttft_s:.2f} s"]
        facts += [] if speed is None else [f"{speed:.0f}/s"]
        end = f"{self.status} {self.error_code}" if self.error_code else self._finish or str(self.status)
        return " · ".join([*facts, "left" if self.status == CLIENT_GONE else end])

    def line(self, ended_s: float) -> str:
        usage = total_usage(self._usages, self.receipts.choices_per_prompt) if self._usages else None
        receipt = self.receipts.total()
        facts: dict[str, Any] = {
            "id": self.request_id,
            "status": self.status,
            "method": self.method,
            "path": self.path,
            "key": self.key_name,
            "reply": self.reply_id,
            "model": self.model,
            "served_by": None if self.served_by == self.model else self.served_by,
            "inputs": self.num_inputs,
            "prompt_tokens": self.prompt_tokens if usage is None else usage.prompt_tokens,
            "cached_tokens": self.cached_tokens if usage is None else usage.cached_tokens,
            "disk_tokens": (receipt and receipt.disk_tokens) or None,
            "hit": receipt and receipt.hit,
            "cache_mb": _cache_mb(receipt),
            "expected_tokens": (receipt and receipt.expected_tokens) or None,
            "altered": self.prompt_change,
            # `altered` reports the shortfall of an altered prompt.
            "not_cached": None if receipt is None or receipt.shortfall is Shortfall.ALTERED else receipt.why,
            "template": ", ".join(receipt.template) or None if receipt else None,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "reasoning_tokens": None if usage is None else usage.reasoning_tokens,
            "ttft_s": self._ttft_s,
            "duration_s": round(ended_s - self.started_s, 4),
            "prompt_tokens_per_s": self._prompt_tokens_per_s(usage),
            "tokens_per_s": self._tokens_per_s(usage, ended_s),
            "finish": self._finish or None,
            "error": self.error_code,
        }
        return " ".join(f"{name}={quoted(value)}" for name, value in facts.items() if value is not None)

    def _prompt_tokens_per_s(self, usage: Usage | None) -> float | None:
        """Return the speed of computing tokens that were not cached, including the time in the queue."""
        if usage is None or self.first_output_s is None:
            return None
        return round((usage.prompt_tokens - usage.cached_tokens) / max(self.first_output_s - self.started_s, 1e-6), 1)

    def _tokens_per_s(self, usage: Usage | None, ended_s: float) -> float | None:
        """Return the speed of the tokens after the first, so that waiting and prefill do not count."""
        if usage is None or self.first_output_s is None or usage.completion_tokens < 2:
            return None
        return round((usage.completion_tokens - 1) / max(ended_s - self.first_output_s, 1e-6), 1)


def _cache_mb(receipt: CacheReceipt | None) -> str | None:
    """Return the size of the prefix cache at the look-up, and its limit; None if there is no cache."""
    if receipt is None or not receipt.max_cache_bytes:
        return None
    return f"{receipt.cache_bytes / 1e6:.1f}/{receipt.max_cache_bytes / 1e6:.1f}"


def quoted(value: object) -> str:
    text = cut(str(value))
    return text if re.fullmatch(r"[!#-<>-~]+", text) else ascii(text)


def cut(text: str) -> str:
    return text if len(text) <= MAX_FIELD else f"{text[:MAX_FIELD]}... ({len(text) - MAX_FIELD} characters more)"


async def error_of(work: Awaitable[None]) -> Exception | None:
    """Return the error that ends `work`, or None. Cancellation is not caught.

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
