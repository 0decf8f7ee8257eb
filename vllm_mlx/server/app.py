"""Builds the HTTP application from its routes, its middlewares and the files of the status page. Knows no protocol."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial
from importlib.resources import files

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from .. import __version__
from ..disk.kept import Journal
from ..engine.client import EngineClient
from ..engine.found_models import FoundModels
from .bodies import BodyLimit, body_turns
from .config import ServerConfig
from .connection import refuse_connection
from .error_handlers import HANDLERS
from .guards import METRICS_PATH, GuardMiddleware, KeyCheck, RateLimit, names_with, refuse_host, refuse_site
from .history import History
from .log import RECEIPT_HEADER
from .recorder import RequestRecorder
from .request_log import UNKNOWN_HEADER, OpenRequests, RequestLog
from .responses import responses_routes
from .routes import anthropic_routes, models_routes, openai_routes
from .search_client import SearchClient
from .status import Recent, status_routes

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
ABOUT = {"name": "vllm-mlx", "version": __version__, "api": "/openapi.json", "models": "/v1/models", "page": "/"}


def create_app(
    engine: EngineClient,
    config: ServerConfig,
    responses: Journal | None = None,
    recorder: RequestRecorder | None = None,
    found: FoundModels | None = None,
) -> FastAPI:
    """Build the application. `responses` keeps stored responses; `found` has the models of `models_from`."""
    recent, history, requests = Recent(), History(), OpenRequests()

    # FastAPI's pages of documentation are off, since they load scripts from the internet.
    app = FastAPI(
        title="vllm-mlx",
        version=__version__,
        openapi_url=None,
        middleware=_middleware(config, recent, recorder, requests),
        exception_handlers=HANDLERS,
        lifespan=lambda _: _lifespan(history.following(engine.status), recorder),
    )
    app.add_api_route("/openapi.json", partial(_openapi, app), include_in_schema=False)
    app.state.config, app.state.found = config, found
    app.state.open_requests = requests
    app.state.body_turns = body_turns()
    app.state.queue = engine.queue
    app.state.search = None if config.web_search is None else SearchClient(config.web_search)
    models = config.models
    app.include_router(openai_routes(engine, config))
    app.include_router(anthropic_routes(engine, config))
    app.include_router(responses_routes(engine, config, responses))
    app.include_router(models_routes(engine, models, found, searches=config.web_search is not None))
    app.include_router(status_routes(engine, models, recent, history))
    app.include_router(page_routes())
    return app


async def _openapi(app: FastAPI) -> Response:
    """Build the document in a thread: it takes half a second once, and other requests should not wait for it."""
    return JSONResponse(await asyncio.to_thread(app.openapi))


@asynccontextmanager
async def _lifespan(
    following: AbstractAsyncContextManager[None], recorder: RequestRecorder | None
) -> AsyncIterator[None]:
    async with following:
        yield
    if recorder is not None:
        await asyncio.to_thread(recorder.close)


def _middleware(
    config: ServerConfig, recent: Recent, recorder: RequestRecorder | None, requests: OpenRequests
) -> list[Middleware]:
    """List the middlewares from the outside in. They are plain ASGI: Starlette's base class costs time per event and
    hides disconnects.
    """
    layers = [Middleware(RequestLog, recent=recent, requests=requests, recorder=recorder)]
    layers += [Middleware(GuardMiddleware, guard=partial(refuse_connection, config.connections))]
    layers += [Middleware(GuardMiddleware, guard=partial(refuse_host, names_with(config.host_names)))]
    layers += [Middleware(GuardMiddleware, guard=partial(refuse_site, config.cors_origins))]
    if config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", RECEIPT_HEADER, UNKNOWN_HEADER],
            )
        )
    if config.api_keys:
        open_paths = page_files().keys() | ({METRICS_PATH} if config.metrics_open else set())
        layers.append(Middleware(GuardMiddleware, guard=KeyCheck(config.api_keys, open_paths)))
    if config.max_requests_per_minute is not None:
        layers.append(Middleware(GuardMiddleware, guard=RateLimit(config.max_requests_per_minute)))
    return [*layers, Middleware(BodyLimit, max_body_bytes=config.max_body_bytes, body_s=config.body_s)]


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the media type of each file, by the path of its URL.

    These paths need no API key: the page itself asks for one and displays no data without it.
    """
    found = {}
    for file in (files("vllm_mlx") / "server" / "page").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in TYPES:
            found["/" if file.name == "index.html" else f"/page/{file.name}"] = file.read_bytes(), TYPES[suffix]
    return found


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(http: Request) -> Response:
        """Send the page to browsers, and a short JSON object to programs."""
        if "text/html" in http.headers.get("accept", ""):
            return _file("/", vary="accept")
        return JSONResponse(ABOUT, headers={"vary": "accept"})

    for path in page_files().keys() - {"/"}:
        router.add_api_route(path, _endpoint(path), methods=["GET", "HEAD"])
    return router


def _endpoint(path: str) -> Callable[[], Awaitable[Response]]:
    async def part() -> Response:
        return _file(path)

    return part


def _file(path: str, **headers: str) -> Response:
    content, media_type = page_files()[path]
    return Response(content, headers={**HEADERS, **headers}, media_type=media_type)
