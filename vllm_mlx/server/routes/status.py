"""`/v1/status`, `/metrics`, `/v1/cache`, and cancelling a request."""

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...api.error_replies import OpenAIError
from ...core.errors import shown
from ..history import History
from ..ports import Engine
from ..tenants import managed_salts
from ..visibility import visible_to
from ..watching import StatusStream

IntervalSeconds = Annotated[float, Query(ge=0.1, le=60, description="Seconds from one event to the next.")]


Current = Callable[[], Awaitable[dict[str, Any]]]


def status_routes(engine: Engine, current: Current, history: History) -> APIRouter:
    """`current` gives the complete status, from which the parts that a client may not see are then removed."""
    router = APIRouter(tags=["Server"])
    _add_status(router, engine, current, history)
    _add_cancel(router, engine)
    _add_cache(router, engine)
    return router


def _add_status(router: APIRouter, engine: Engine, current: Current, history: History) -> None:
    @router.get("/v1/status")
    async def status(http: Request) -> dict[str, Any]:
        """Running requests, rates, memory and the prefix cache."""
        return visible_to(http.scope, await current())

    @router.get("/v1/status/stream", responses={200: {"content": {"text/event-stream": {}}}})
    async def stream(http: Request, interval: IntervalSeconds = 1.0) -> Response:
        """The same as server-sent events, now and every `interval` seconds."""

        async def visible() -> dict[str, Any]:
            return visible_to(http.scope, await current())

        return StatusStream(visible, interval_s=interval)

    @router.get("/v1/status/history")
    async def past() -> dict[str, Any]:
        """Rates and latencies of the last ten minutes, oldest first."""
        return {"object": "list", "every_s": history.every_s, "data": history.samples()}

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
    @router.get("/v1/cache")
    async def cache() -> dict[str, Any]:
        """List the prefix cache's tree: each entry is a run of tokens that follows its parent's."""
        entries = [asdict(entry) for entry in await engine.cache_entries()]
        for entry in entries:
            entry["age_s"] = round(max(0.0, time.monotonic() - entry["last_used"]), 1)
            entry["fingerprint"], entry["salted"] = entry["space"][0], bool(entry.pop("space")[1])
        return {"object": "list", "data": entries, "cache": (await engine.status())["cache"]}

    @router.delete("/v1/cache")
    async def clear_cache(http: Request) -> dict[str, Any]:
        """Clear the cached state of the same API key, or of all with an admin key. Running requests continue."""
        freed_bytes = await engine.clear_cache(salts=managed_salts(http.scope))
        return {"object": "cache.cleared", "freed_bytes": freed_bytes}


@dataclass(frozen=True, slots=True)
class _Families:
    """The metrics in the form of a registry, which the encoder expects."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families
