"""Builds the HTTP application from its routes and middlewares. Knows no protocol."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from .. import __version__
from ..disk.kept import Journal
from ..engine.client import EngineClient
from .bodies import BodyLimit, body_turns
from .config import ServerConfig
from .connection import refuse_connection
from .ending import EndMiddleware, OpenRequests
from .error_handlers import HANDLERS
from .guards import METRICS_PATH, GuardMiddleware, HostCheck, KeyCheck, RateLimit, SiteCheck, own_names
from .log import RECEIPT_HEADER, UNKNOWN_HEADER, RequestLog
from .recorder import RequestRecorder
from .responses import responses_routes
from .routes import ServedModels, anthropic_routes, models_routes, openai_routes
from .search_client import SearchClient
from .status import History, Recent, status_routes
from .status_page import page_files, page_routes


def create_app(
    engine: EngineClient,
    config: ServerConfig,
    responses: Journal | None = None,
    recorder: RequestRecorder | None = None,
) -> FastAPI:
    """`responses`: keeps stored responses for the next start. `recorder`: the result of `open_recorder`; the
    application closes it when it ends.
    """
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
    app.state.config = config
    app.state.open_requests = requests
    app.state.body_turns = body_turns()
    app.state.search = None if config.web_search is None else SearchClient(config.web_search)
    models = ServedModels(config.served_model_names)
    app.include_router(openai_routes(engine, config, models))
    app.include_router(anthropic_routes(engine, config, models))
    app.include_router(responses_routes(engine, config, models, responses))
    app.include_router(models_routes(engine, models, searches=config.web_search is not None))
    app.include_router(status_routes(engine, recent, history))
    app.include_router(page_routes())
    return app


async def _openapi(app: FastAPI) -> Response:
    """Build the document in a thread: it takes half a second once, and nobody else should wait for it."""
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
    layers = [Middleware(RequestLog, recent=recent, recorder=recorder), Middleware(EndMiddleware, requests=requests)]
    layers += [Middleware(GuardMiddleware, guard=partial(refuse_connection, config.connections))]
    layers += [Middleware(GuardMiddleware, guard=HostCheck((*own_names(), *config.host_names)))]
    layers += [Middleware(GuardMiddleware, guard=SiteCheck(config.cors_origins))]
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
