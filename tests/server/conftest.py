"""The server of a module, an HTTP client of it, and the vendors' own clients."""

from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from tests.support.running import Running, serving

from .fakes import FakeEngine, hello
from .searching import once
from .searx import Searx, searx
from .watched import engine_served


@pytest.fixture(scope="module")
def web() -> Iterator[Searx]:
    with searx() as running:
        yield running


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[Running]:
    """A server whose engine follows a script. A module that names a `MODEL` gets a real engine with its `SETTINGS`.

    The server has the module's `OPTIONS`, and searches the web for modules that say `SEARCHES = True`.
    """
    module, options = request.module, dict(getattr(request.module, "OPTIONS", {}))
    if hasattr(module, "SEARCHES"):
        options["web_search"] = request.getfixturevalue("web").url
    if (model := getattr(module, "MODEL", None)) is None:
        served = serving(FakeEngine(), **options)
    else:
        path = model if model == "demo" else checkpoint(model)
        served = engine_served(path, options=options, **getattr(module, "SETTINGS", {}))
    with served as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture
def engine(server: Running, request: pytest.FixtureRequest) -> FakeEngine:
    """It says hello, or searches once, and has seen nothing yet."""
    engine: FakeEngine = server.engine
    engine.play, engine.refuse, engine.prompt_change = hello, None, None
    if hasattr(request.module, "SEARCHES"):
        web: Searx = request.getfixturevalue("web")
        web.queries.clear()
        web.answer, engine.play = Searx.answer, once
    for seen in (engine.requests, engine.counted, engine.aborted, engine.finished):
        seen.clear()
    return engine


@pytest.fixture(scope="module")
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
