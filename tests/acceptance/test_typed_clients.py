"""Libraries that ask for typed objects get them from the demo checkpoint: instructor and pydantic-ai, where installed.

`pip install -e '.[clients]'`, then `pytest -m full tests/acceptance/test_typed_clients.py`.
"""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.running import Running, serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine

pytestmark = pytest.mark.full
OFF: Any = {"chat_template_kwargs": {"enable_thinking": False}}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    color: Literal["red", "blue"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(start_engine(EngineConfig(model="demo", max_model_len=4096))) as running:
        yield running


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(server: Running, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        messages = [{"role": "user", "content": "Who is there?"}]
        person = client.chat.completions.create(
            model="tiny", response_model=Person, messages=messages, max_tokens=600, extra_body=OFF, max_retries=0
        )
    assert isinstance(person, Person)


@pytest.mark.parametrize("output", ["NativeOutput", "ToolOutput"])
@pytest.mark.parametrize("model", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(server: Running, output: str, model: str) -> None:
    library = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="any")
    agent = library.Agent(
        getattr(models, model)("tiny", provider=provider),
        output_type=getattr(library, output)(Person),
        retries=0,
        model_settings={"max_tokens": 600, "extra_body": OFF},
    )
    assert isinstance(agent.run_sync("Who is there?").output, Person)
