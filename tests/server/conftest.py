"""The vendors' own clients, of whichever server a module has."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.support.running import Running


@pytest.fixture
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
