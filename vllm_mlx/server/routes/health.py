"""`GET /health` and a client's probe. Neither waits for the engine."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from ..ports import Engine


def health_routes(engine: Engine) -> APIRouter:
    router = APIRouter(tags=["Server"])

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

    return router
