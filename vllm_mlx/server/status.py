"""Reports status, metrics, cache and health. Lets administrators cancel requests and clear the cache. Decides which
fields each client may see.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Annotated, Any, cast

from fastapi import APIRouter, Query, Request
from prometheus_client.exposition import choose_encoder
from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Scope

from .. import __version__
from ..api.error_replies import OpenAIError
from ..cache.stats import Entry
from ..core.catalogue import Catalogue
from ..core.errors import VLLMMLXError, shown
from ..engine.client import EngineClient
from ..engine.monitoring.schema import EngineStatus
from .error_handlers import REPLY_PATHS
from .guards import is_admin, managed_salts, may_see, shown_model, tenant_of
from .history import History
from .schema import CacheEntry, CacheTree, LastError, LastReply, OtherEntries, ServerStatus, StatusHistory

MAX_ERRORS = 20
MAX_REPLIES = 30
MAX_DISK_ENTRIES = 1000  # a folder may hold many more
_SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens")
_OTHER_PATH = "/v1/…"  # replaces paths that hold ids or words of a client
IntervalSeconds = Annotated[float, Query(ge=0.1, le=60, description="Seconds from one event to the next.")]
_TREE = TypeAdapter(CacheTree)


class Recent:
    """Recent replies and errors with the tenants that own them: bounded, in memory, without prompts and replies."""

    def __init__(self) -> None:
        self._replies: deque[tuple[str, LastReply]] = deque(maxlen=MAX_REPLIES)
        self._errors: deque[tuple[str, LastError]] = deque(maxlen=MAX_ERRORS)

    def add_reply(self, reply: LastReply, *, tenant: str) -> None:
        self._replies.append((tenant, reply))

    def add_error(self, error: LastError, *, tenant: str) -> None:
        self._errors.append((tenant, error))

    def status_for(self, scope: Scope, engine: EngineStatus, names: Sequence[str] = ()) -> ServerStatus:
        """Build the status that this client may see.

        Holders of an admin key see everything, and so do all clients if there is one key or none. Of other keys,
        clients see replies as one sum, and requests and errors without words, ids and clients.
        """
        viewer = None if is_admin(scope) else tenant_of(scope)
        others: list[Any] = [reply for owner, reply in self._replies if viewer not in (None, owner)]
        status = {
            "time": round(time.time(), 3),
            **engine,
            "model": (facts := engine["model_facts"]) and shown_model(scope, facts["model"]),
            "model_facts": facts and {**facts, "model": shown_model(scope, facts["model"])},
            "served_model_names": list(names),
            "requests": [_visible(viewer, entry["tenant"], entry) for entry in engine["requests"]],
            "last_replies": [reply for owner, reply in reversed(self._replies) if viewer in (None, owner)],
            "other_replies": {
                "num_replies": len(others),
                **{name: sum(reply[name] for reply in others) for name in _SUMMED},
            },
            "last_errors": [_visible(viewer, *owned) for owned in reversed(self._errors)],
        }
        return cast(ServerStatus, status)


def _visible(viewer: str | None, owner: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry as `viewer` sees it, without its owner. The viewer None sees everything."""
    hidden = {name: value for name, value in entry.items() if name != "tenant"}
    if viewer is None or viewer == owner:
        return hidden
    hidden["request_id"] = hidden["client"] = None
    if "message" in hidden:
        hidden["message"] = None
    if hidden.get("path") not in (None, *REPLY_PATHS):
        hidden["path"] = _OTHER_PATH
    if hidden.get("why_not_cached"):
        hidden["why_not_cached"] = hidden["why_not_cached"].partition(":")[0]  # token ids follow the first word
    return hidden


def status_routes(engine: EngineClient, models: Catalogue, recent: Recent, history: History) -> APIRouter:
    router = APIRouter(tags=["Server"])
    _add_status(router, engine, models, recent, history)
    _add_management(router, engine)
    _add_health(router, engine)
    return router


def _add_status(router: APIRouter, engine: EngineClient, models: Catalogue, recent: Recent, history: History) -> None:
    async def told(scope: Scope) -> bytes:
        return to_json(recent.status_for(scope, await engine.status(), models.names))

    async def events(scope: Scope, interval_s: float) -> AsyncIterator[bytes]:
        """Yield the status again and again. The last event is `error` and says why the stream ends."""
        try:
            while True:
                yield b"data: %s\n\n" % await told(scope)
                await asyncio.sleep(interval_s)
        except VLLMMLXError as error:
            yield b"event: error\ndata: %s\n\n" % to_json({"message": error.message})

    @router.get("/v1/status", responses={200: {"model": ServerStatus}})
    async def status(http: Request) -> Response:
        """Report running requests, rates, memory and the prefix cache."""
        return Response(await told(http.scope), media_type="application/json")

    @router.get("/v1/status/stream", responses={200: {"content": {"text/event-stream": {}}}})
    async def stream(http: Request, interval: IntervalSeconds = 1.0) -> Response:
        """Send the status as server-sent events, now and every `interval` seconds."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(events(http.scope, interval), headers=headers, media_type="text/event-stream")

    @router.get("/v1/status/history", responses={200: {"model": StatusHistory}})
    async def past() -> Response:
        """Report rates and latencies of the last ten minutes, oldest first."""
        return Response(to_json(history.told(time.time())), media_type="application/json")

    @router.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Report metrics for Prometheus, in its text format."""
        # Prometheus prefers OpenMetrics, but there prometheus_client writes vLLM's colons as underscores.
        encode, media_type = choose_encoder("text/plain")
        families = await engine.metrics()
        registry: Any = SimpleNamespace(collect=lambda: families)  # the encoder uses nothing else
        return Response(encode(registry), headers={"content-type": media_type})


def _add_management(router: APIRouter, engine: EngineClient) -> None:
    @router.post("/v1/requests/{request_id}/cancel", responses={404: {"model": OpenAIError}})
    async def cancel(request_id: str, http: Request) -> dict[str, Any]:
        """Cancel a request of the same API key, or any with an admin key. Its client gets an error."""
        if not engine.cancel(request_id, salts=managed_salts(http.scope)):
            raise HTTPException(404, f"No request `{shown(request_id)}` is running.")
        return {"object": "request.cancelled", "id": request_id}

    @router.get("/v1/cache", responses={200: {"model": CacheTree}})
    async def cache(http: Request) -> Response:
        """List the prefix cache's tree: each entry is a run of tokens that follows its parent's."""
        held, others = _divided(await engine.cache_entries(), http.scope)
        kept, others_on_disk = _divided(await engine.disk_entries(), http.scope)
        tree: CacheTree = {
            "object": "list",
            "data": [_cache_entry(entry, time.monotonic()) for entry in held],
            "disk": [_cache_entry(entry, time.time()) for entry in _last_used(kept)],
            "others": others,
            "others_on_disk": others_on_disk,
            "cache": (await engine.status())["cache"],
        }
        return Response(_TREE.dump_json(tree), media_type="application/json")

    @router.delete("/v1/cache")
    async def clear_cache(http: Request, salt: str = "") -> dict[str, Any]:
        """Clear the cached state of the same API key, or of all with an admin key. Running requests continue.

        `salt` limits this to cache salts that begin with it.
        """
        freed_bytes = await engine.clear_cache(salts=managed_salts(http.scope) + salt)
        return {"object": "cache.cleared", "freed_bytes": freed_bytes}


def _divided(entries: list[Entry], scope: Scope) -> tuple[list[Entry], OtherEntries]:
    """Return the entries that the sender may see, and a sum of the others."""
    others = [entry for entry in entries if not may_see(scope, entry.space[1])]
    return [entry for entry in entries if may_see(scope, entry.space[1])], {
        "num_entries": len(others),
        "num_tokens": sum(entry.end - entry.start for entry in others),
        "num_bytes": sum(entry.segment_bytes + entry.state_bytes for entry in others),
    }


def _last_used(entries: list[Entry]) -> list[Entry]:
    """Return the MAX_DISK_ENTRIES entries that were used last, and all entries that these follow."""
    by_id = {entry.node_id: entry for entry in entries}
    chosen: dict[int, Entry] = {}
    for entry in sorted(entries, key=lambda entry: -entry.last_used)[:MAX_DISK_ENTRIES]:
        follows: Entry | None = entry
        while follows is not None and follows.node_id not in chosen:
            chosen[follows.node_id] = follows
            follows = by_id.get(follows.parent_id) if follows.parent_id is not None else None
    return list(chosen.values())


def _cache_entry(entry: Entry, now: float) -> CacheEntry:
    """Describe an entry. `now` is a time of the clock of `entry.last_used`."""
    fingerprint, salt = entry.space
    age_s = round(max(0.0, now - entry.last_used), 1)
    return CacheEntry(**asdict(entry), age_s=age_s, fingerprint=fingerprint, salted=bool(salt))


def _add_health(router: APIRouter, engine: EngineClient) -> None:
    @router.head("/health", include_in_schema=False)
    @router.get(
        "/health", responses={503: {"description": "The engine has stopped or hangs, or no prompt can be prepared."}}
    )
    async def health() -> JSONResponse:
        """Report `ok` while the engine makes steps, even if it is busy."""
        if engine.is_healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "error", "error": engine.error()}, 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Report the version of this server, in the form in which vLLM reports its own."""
        return {"version": __version__}

    @router.api_route("/api/hello", methods=["GET", "HEAD"], include_in_schema=False)
    async def hello() -> dict[str, Any]:
        """Answer Claude Code, which asks whether a server is there."""
        return {"message": "hello"}
