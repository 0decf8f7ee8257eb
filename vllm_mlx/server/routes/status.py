"""What the server reports of itself, and what an administrator does: status, metrics, cache, health, cancelling."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from ...api.error_replies import OpenAIError
from ...cache.stats import Entry
from ...core.errors import VLLMMLXError, shown
from ...engine.monitoring.schema import CacheStatus
from ..error_handlers import ClientGone
from ..interfaces import Engine
from ..status import History, Recent, Sample, ServerStatus
from ..streaming import while_connected
from ..tenants import managed_salts

IntervalSeconds = Annotated[float, Query(ge=0.1, le=60, description="Seconds from one event to the next.")]


class StatusHistory(TypedDict):
    """Samples of the last ten minutes, one every `every_s` seconds, oldest first."""

    object: Literal["list"]
    every_s: float
    data: list[Sample]


class CacheEntry(TypedDict):
    """A run of tokens in the prefix cache: the tokens `start` to `end` of the prompts that share it.

    `fingerprint` is the model's; `salted` says whether the run belongs to an API key or has a salt.
    """

    node_id: int
    parent_id: int | None
    start: int
    end: int
    segment_bytes: int
    state_bytes: int
    window_start: int
    last_used: float
    hits: int
    state_hits: int
    num_children: int
    pins: int
    age_s: float
    fingerprint: str
    salted: bool


class CacheTree(TypedDict):
    """The prefix cache: its entries, each of which follows its parent, and its figures."""

    object: Literal["list"]
    data: list[CacheEntry]
    cache: CacheStatus


def status_routes(engine: Engine, recent: Recent, history: History) -> APIRouter:
    router = APIRouter(tags=["Server"])
    _add_status(router, engine, recent, history)
    _add_cancel(router, engine)
    _add_cache(router, engine)
    _add_health(router, engine)
    return router


def _add_status(router: APIRouter, engine: Engine, recent: Recent, history: History) -> None:
    async def visible_to(scope: Scope) -> ServerStatus:
        figures = await engine.status()
        return recent.status_for(scope, figures)

    @router.get("/v1/status", responses={200: {"model": ServerStatus}})
    async def status(http: Request) -> Response:
        """Running requests, rates, memory and the prefix cache."""
        return _json(await visible_to(http.scope))

    @router.get("/v1/status/stream", responses={200: {"content": {"text/event-stream": {}}}})
    async def stream(http: Request, interval: IntervalSeconds = 1.0) -> Response:
        """The same as server-sent events, now and every `interval` seconds."""
        return StatusStream(lambda: visible_to(http.scope), interval_s=interval)

    @router.get("/v1/status/history", responses={200: {"model": StatusHistory}})
    async def past() -> Response:
        """Rates and latencies of the last ten minutes, oldest first."""
        samples: StatusHistory = {"object": "list", "every_s": history.every_s, "data": history.samples()}
        return _json(samples)

    @router.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Metrics for Prometheus, in its text format."""
        # Prometheus prefers OpenMetrics, but there prometheus_client writes vLLM's colons as underscores.
        encode, media_type = choose_encoder("text/plain")
        return Response(encode(_Families(await engine.metrics())), headers={"content-type": media_type})


def _add_cancel(router: APIRouter, engine: Engine) -> None:
    @router.post("/v1/requests/{request_id}/cancel", responses={404: {"model": OpenAIError}})
    async def cancel(request_id: str, http: Request) -> dict[str, Any]:
        """Cancel a request of the same API key, or any with an admin key. Its client gets an error."""
        if not engine.cancel(request_id, salts=managed_salts(http.scope)):
            raise HTTPException(404, f"No request `{shown(request_id)}` is running.")
        return {"object": "request.cancelled", "id": request_id}


def _add_cache(router: APIRouter, engine: Engine) -> None:
    @router.get("/v1/cache", responses={200: {"model": CacheTree}})
    async def cache() -> Response:
        """List the prefix cache's tree: each entry is a run of tokens that follows its parent's."""
        entries = [_cache_entry(entry) for entry in await engine.cache_entries()]
        tree: CacheTree = {"object": "list", "data": entries, "cache": (await engine.status())["cache"]}
        return _json(tree)

    @router.delete("/v1/cache")
    async def clear_cache(http: Request) -> dict[str, Any]:
        """Clear the cached state of the same API key, or of all with an admin key. Running requests continue."""
        freed_bytes = await engine.clear_cache(salts=managed_salts(http.scope))
        return {"object": "cache.cleared", "freed_bytes": freed_bytes}


def _cache_entry(entry: Entry) -> CacheEntry:
    fingerprint, salt = entry.space
    return {
        "node_id": entry.node_id,
        "parent_id": entry.parent_id,
        "start": entry.start,
        "end": entry.end,
        "segment_bytes": entry.segment_bytes,
        "state_bytes": entry.state_bytes,
        "window_start": entry.window_start,
        "last_used": entry.last_used,
        "hits": entry.hits,
        "state_hits": entry.state_hits,
        "num_children": entry.num_children,
        "pins": entry.pins,
        "age_s": round(max(0.0, time.monotonic() - entry.last_used), 1),
        "fingerprint": fingerprint,
        "salted": bool(salt),
    }


def _add_health(router: APIRouter, engine: Engine) -> None:
    @router.get(
        "/health", responses={503: {"description": "The engine has stopped or hangs, or no prompt can be prepared."}}
    )
    async def health() -> JSONResponse:
        """`ok` while the engine makes steps, even if it is busy."""
        if engine.is_healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "error", "error": engine.error()}, 503)

    @router.api_route("/api/hello", methods=["GET", "HEAD"], include_in_schema=False)
    async def hello() -> dict[str, Any]:
        """Answer Claude Code, which asks whether a server is there."""
        return {"message": "hello"}


def _json(value: Mapping[str, Any]) -> Response:
    """Encode a value without validating it again."""
    return Response(to_json(value), media_type="application/json")


class StatusStream(Response):
    """Status events, now and every `interval_s`. The last event is `error` and says why the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, ask: Callable[[], Awaitable[ServerStatus]], *, interval_s: float) -> None:
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


@dataclass(frozen=True, slots=True)
class _Families:
    """The metrics in the form of a registry, which the encoder expects."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families
