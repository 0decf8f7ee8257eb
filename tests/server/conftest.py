"""A server whose engine follows a script, and the vendors' own clients of whichever server a module has."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.support.running import Running, serving

from .fakes import FakeEngine, hello


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(FakeEngine()) as running:
        yield running


@pytest.fixture
def engine(server: Running) -> FakeEngine:
    """It says hello, and has seen nothing yet."""
    engine: FakeEngine = server.engine
    engine.play, engine.refuse = hello, None
    for seen in (engine.requests, engine.counted, engine.aborted):
        seen.clear()
    return engine


@pytest.fixture
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
