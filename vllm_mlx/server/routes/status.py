"""`/v1/status` and `/v1/cache`: what the server does right now, and what it remembers."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from ..ports import Engine


def status_routes(engine: Engine) -> APIRouter:
    router = APIRouter(tags=["Server"])

    @router.get("/v1/status")
    async def status() -> dict[str, Any]:
        """Requests under way, rates, memory and the prefix cache."""
        return await engine.status()

    @router.get("/v1/cache")
    async def cache() -> dict[str, Any]:
        """The prefix cache's tree: each entry is a run of tokens that follows its parent's."""
        entries = [asdict(entry) for entry in await engine.cache_entries()]
        for entry in entries:
            entry["fingerprint"], entry["salted"] = entry["space"][0], bool(entry.pop("space")[1])
        return {"object": "list", "data": entries, "cache": (await engine.status())["cache"]}

    @router.delete("/v1/cache")
    async def clear_cache() -> dict[str, Any]:
        """Forget all cached state. Running replies go on."""
        return {"object": "cache.cleared", "freed_bytes": await engine.clear_cache()}

    return router
