"""A server whose engine follows a script, and the vendors' own clients of whichever server a module has."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.support.running import Running, serving

from .fakes import FakeEngine, hello
from .searching import once
from .searx import Searx, searx


@pytest.fixture(scope="module")
def web() -> Iterator[Searx]:
    with searx() as running:
        yield running


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """It searches the web for modules that say `SEARCHES = True`."""
    options = {"web_search": request.getfixturevalue("web").url} if hasattr(request.module, "SEARCHES") else {}
    with serving(FakeEngine(), **options) as running:
        yield running


@pytest.fixture
def engine(server: Running, request: pytest.FixtureRequest) -> FakeEngine:
    """It says hello, or searches once, and has seen nothing yet."""
    engine: FakeEngine = server.engine
    engine.play, engine.refuse = hello, None
    if hasattr(request.module, "SEARCHES"):
        web: Searx = request.getfixturevalue("web")
        web.queries.clear()
        web.answer, engine.play = Searx.answer, once
    for seen in (engine.requests, engine.counted, engine.aborted):
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
