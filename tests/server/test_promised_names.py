"""Names that users were promised are those of flags, bodies, replies and paths."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.commands import call
from tests.support.promised import PROMISED, promised
from tests.support.rote import rote_checkpoint
from tests.support.rows import row
from vllm_mlx.cli.options import load_settings
from vllm_mlx.core.config import ReasoningStrings

from .watched import engine_served


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = rote_checkpoint(tmp_path_factory.mktemp("promised"), "qwen3", thought_tokens=4)
    with engine_served(path, reasoning_parser="qwen3", tool_call_parser="hermes") as running, running.http() as client:
        yield client


def fields_of(document: dict[str, Any], path: str) -> set[str]:
    """The fields of all bodies that the endpoint takes."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    bodies = [each["$ref"].rsplit("/", 1)[-1] for each in schema.get("oneOf", [schema])]
    return {field for body in bodies for field in document["components"]["schemas"][body]["properties"]}


@row("S1-5", "S2-14", "S3-1", "S3-14", "S3-15", "S4-1", "S4-32")
def test_the_document_has_the_promised_paths_and_fields(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert set(promised("paths")) <= document["paths"].keys()
    assert set(promised("chat")) <= fields_of(document, "/v1/chat/completions")
    assert set(promised("completions")) <= fields_of(document, "/v1/completions")


@row("S0-1", "S0-6", "S1-1", "S1-5", "S2-12", "S2-14", "S3-1", "S3-14", "S3-15")
@pytest.mark.parametrize("effort", PROMISED["S3-14"]["efforts"])
def test_a_chat_takes_and_answers_the_promised_names(client: httpx.Client, effort: str) -> None:
    said = dict.fromkeys(promised("message"), "Before.")
    body = {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Yes.", **said},
            {"role": "user", "content": "And?"},
        ],
        "max_tokens": 30,
        "reasoning_effort": effort,
        "thinking_token_budget": 2,
        "cache_reasoning_tokens": True,
        "include_reasoning": True,
        "chat_template_kwargs": {},
        "structured_outputs": {"regex": "[ab]+", **dict.fromkeys(promised("structured_outputs"), False)},
    }
    assert body.keys() >= set(promised("chat"))
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert set(promised("usage")) <= reply.json()["usage"].keys()
    assert set(promised("usage_details")) <= reply.json()["usage"]["completion_tokens_details"].keys()
    message = reply.json()["choices"][0]["message"]
    assert {message[name] for name in promised("message")} == {message["reasoning"]}


@row("S1-5", "S3-7", "S3-19")
def test_serving_has_the_promised_flags() -> None:
    shown = call("serve", "--help-all").stdout
    assert set(promised("flags")) <= set(re.findall(r"--[a-z-]+", shown))


@row("S3-7")
@pytest.mark.parametrize("given", PROMISED["S3-7"]["reasoning_config"])
def test_reasoning_config_takes_the_promised_names(given: dict[str, str]) -> None:
    read = load_settings({"model": "m", "reasoning_config": json.dumps(given)}).engine_config()
    assert read.reasoning_config == ReasoningStrings("<a>", "</a>")


@row("S4-7", "S4-32")
def test_the_status_counts_the_promised_kinds_of_hits(client: httpx.Client) -> None:
    assert set(client.get("/v1/status").json()["cache"]["hits_by_kind"]) == set(PROMISED["S4-7"]["hits"])
