"""The fields that attacks are planted in: all that the wire types have, in bodies that are valid but for them."""

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from tests.server.fakes import FakeEngine
from tests.support.harm.fields import Document
from tests.support.running import named
from vllm_mlx.api.anthropic.schema import CountTokensBody, MessagesBody
from vllm_mlx.api.openai.decode import AnyChatBody
from vllm_mlx.api.openai.schema import ChatCompletionBody, CompletionBody
from vllm_mlx.api.responses.schema import ResponsesBody
from vllm_mlx.server.app import create_app
from vllm_mlx.server.config import ServerConfig

HI: Any = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: list[tuple[str, type[BaseModel], Any]] = [
    ("/v1/chat/completions", ChatCompletionBody, HI),
    ("/v1/completions", CompletionBody, {"prompt": "Hi"}),
    ("/v1/messages", MessagesBody, {**HI, "max_tokens": 1}),
    ("/v1/messages/count_tokens", CountTokensBody, HI),
    ("/v1/responses", ResponsesBody, {"input": "Hi"}),
]
FORMS: dict[str, Any] = {"/v1/chat/completions": AnyChatBody}
NESTED = {
    "/v1/chat/completions": ["messages[].content[].image_url.url", "messages[].tool_calls[].function.arguments"],
    "/v1/completions": ["prompt[][]", "logit_bias.x"],
    "/v1/messages": ["messages[].content[].content[].source.data", "tools[].input_schema", "thinking.budget_tokens"],
    "/v1/messages/count_tokens": ["system[].text"],
    "/v1/responses": ["input[].encrypted_content", "tools[].tools", "text.format", "metadata.x"],
}


@pytest.fixture(scope="module")
def document() -> Document:
    return Document(create_app(FakeEngine(), ServerConfig(models=named("tiny"))).openapi())


@pytest.mark.parametrize(("path", "model", "base"), BODIES, ids=[body[0] for body in BODIES])
def test_every_field_of_a_wire_type_is_found(
    document: Document, path: str, model: type[BaseModel], base: dict[str, Any]
) -> None:
    names = {field.name for field in document.fields(path, base)}
    assert names >= {"(body)", *model.model_fields, *NESTED[path]}


@pytest.mark.parametrize(("path", "model", "base"), BODIES, ids=[body[0] for body in BODIES])
def test_a_body_is_valid_when_the_value_is(
    document: Document, path: str, model: type[BaseModel], base: dict[str, Any]
) -> None:
    for field in document.fields(path, base)[1:]:
        TypeAdapter(FORMS.get(path, model)).validate_python(field.plant(document.example(field.schema)))
