"""`/v1/status`: its type, what the server adds to the engine's figures, and what each client may see of it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from starlette.types import Scope
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from ..core.errors import EngineDead
from ..engine.monitoring.counters import ReplyProgress
from ..engine.monitoring.schema import EngineFigures, EngineStatus
from .tenants import is_admin, tenant_of

MAX_ERRORS = 20
MAX_REPLIES = 30
SAMPLE_EVERY_S = 2.0
HISTORY_S = 600.0
_PATHS = frozenset(
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "messages/count_tokens", "responses")
)
_OTHER_PATH = "/v1/…"  # replaces paths that hold ids or what a client made up


class RequestStatus(ReplyProgress):
    """A running request. `request_id` is null if it was sent with another API key."""

    request_id: str | None


class LastReply(TypedDict):
    """A reply that has ended. `request_id` is null and `why` shortened if it was sent with another API key."""

    time: float
    request_id: str | None
    path: str
    model: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    finish: str
    expected_tokens: int
    why: str | None


class LastError(TypedDict):
    """A request that failed. `request_id` and `message` are null if it was sent with another API key."""

    time: float
    request_id: str | None
    path: str
    status: int
    code: str | None
    message: str | None


class ServerStatus(EngineFigures):
    """The engine's figures, running requests, and the last replies and errors, newest first. Times are Unix times."""

    time: float
    requests: list[RequestStatus]
    last_replies: list[LastReply]
    last_errors: list[LastError]


class Sample(TypedDict):
    """Figures of one moment. Rates cover the last ten seconds, latencies the last minute."""

    time: float
    generation_tps: float
    prompt_tps: float
    num_running: int
    num_waiting: int
    ttft_p50_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None


class Recent:
    """Recent replies and errors with the tenants that own them: bounded, in memory, without prompts and replies."""

    def __init__(self) -> None:
        self._replies: deque[tuple[str, LastReply]] = deque(maxlen=MAX_REPLIES)
        self._errors: deque[tuple[str, LastError]] = deque(maxlen=MAX_ERRORS)

    def add_reply(self, reply: LastReply, *, tenant: str) -> None:
        self._replies.append((tenant, reply))

    def add_error(self, error: LastError, *, tenant: str) -> None:
        self._errors.append((tenant, error))

    def status_for(self, scope: Scope, engine: EngineStatus) -> ServerStatus:
        """Build the status that this client may see.

        Holders of an admin key see everything, and so does everybody if there is one key or none. For requests of
        other keys, clients see figures and codes without words and ids.
        """
        viewer = None if is_admin(scope) else tenant_of(scope)
        requests = [(entry["tenant"], _without_tenant(entry)) for entry in engine["requests"]]
        status = {
            "time": round(time.time(), 3),
            **engine,
            "requests": [_visible(viewer, *owned) for owned in requests],
            "last_replies": [_visible(viewer, *owned) for owned in reversed(self._replies)],
            "last_errors": [_visible(viewer, *owned) for owned in reversed(self._errors)],
        }
        return cast(ServerStatus, status)


def _without_tenant(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "tenant"}


def _visible(viewer: str | None, owner: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry as `viewer` sees it. None sees all."""
    if viewer is None or viewer == owner:
        return entry
    hidden = {**entry, "request_id": None}
    if "message" in hidden:
        hidden["message"] = None
    if hidden.get("path") not in (None, *_PATHS):
        hidden["path"] = _OTHER_PATH
    for name in ("why", "why_not_cached"):
        if hidden.get(name):
            hidden[name] = hidden[name].partition(":")[0]  # token ids follow the first word
    return hidden


class History:
    """Samples of the last minutes, for clients that begin to watch later: bounded, in memory."""

    def __init__(self, *, every_s: float = SAMPLE_EVERY_S, span_s: float = HISTORY_S) -> None:
        self.every_s = every_s
        self._samples: deque[Sample] = deque(maxlen=int(span_s / every_s))

    @asynccontextmanager
    async def following(self, ask: Callable[[], Awaitable[EngineFigures]]) -> AsyncIterator[None]:
        """Take samples of what `ask` returns, as long as the block lasts and the engine lives."""
        task = asyncio.create_task(self._follow(ask))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self, ask: Callable[[], Awaitable[EngineFigures]]) -> None:
        try:
            while True:
                self.add(await ask(), time.time())
                await asyncio.sleep(self.every_s)
        except EngineDead:
            return

    def add(self, figures: EngineFigures, unix_s: float) -> None:
        latency = figures["latency"]
        self._samples.append(
            {
                "time": round(unix_s, 3),
                "generation_tps": figures["generation_tps"],
                "prompt_tps": figures["prompt_tps"],
                "num_running": figures["num_running"],
                "num_waiting": figures["num_waiting"],
                "ttft_p50_s": latency["ttft_s"]["p50"],
                "inter_token_p50_s": latency["inter_token_s"]["p50"],
                "inter_token_p99_s": latency["inter_token_s"]["p99"],
            }
        )

    def samples(self) -> list[Sample]:
        """Return the samples, oldest first."""
        return list(self._samples)
