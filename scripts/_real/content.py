"""Schemas, choices and tools: a form that is kept, with content that makes sense in it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.served import Server, serving

from .checkpoints import checkpoint
from .sources import SMOLLM2, Source

_SHOWS_TOOLS = Path(__file__).parents[2] / "tests/templates/qwen3.jinja"  # in the markers that SmolLM2 knows
_FACT = "Paris is the capital of France."
_EXAMPLE = [
    {"role": "user", "content": "Berlin is the capital of Germany."},
    {"role": "assistant", "content": '{"country": "Germany", "capital": "Berlin"}'},
]
_SCHEMA = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_NAME, _TEXT = "get_weather", "The weather in a city"
_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
_FUNCTION = {"name": _NAME, "description": _TEXT, "parameters": _CITY}
_TOOL_REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _WEATHER, "tools": [{"type": "function", "function": _FUNCTION}]},
    "/v1/messages": {
        "messages": _WEATHER,
        "tools": [{"name": _NAME, "description": _TEXT, "input_schema": _CITY}],
        "max_tokens": 64,
    },
    "/v1/responses": {"input": _WEATHER, "tools": [{"type": "function", **_FUNCTION}]},
}
Finding = tuple[str, bool, str]


def check(source: Source, form: str) -> tuple[bool, list[str]]:
    folder = checkpoint(source, form)
    with serving(None, str(folder)) as server:
        found = list(_chat(server) if source == SMOLLM2 else _completions(server))
    if source == SMOLLM2:
        template = ("--chat-template", str(_SHOWS_TOOLS), "--tool-call-parser", "hermes")
        with serving(None, str(folder), *template) as server:
            found.append(_forced_call(server))
    lines = [f"{name}: {'' if is_right else 'WRONG, '}{text}" for name, is_right, text in found]
    return all(is_right for _, is_right, _ in found), lines


def _chat(server: Server) -> Iterator[Finding]:
    body: dict[str, Any] = {"messages": [*_EXAMPLE, {"role": "user", "content": _FACT}]}
    format = {"type": "json_schema", "json_schema": {"name": "fact", "schema": _SCHEMA, "strict": True}}
    found = server.post("/v1/chat/completions", {**body, "temperature": 0, "max_tokens": 60, "response_format": format})
    text = found["choices"][0]["message"]["content"]
    yield "JSON schema", _is_fact(text), text
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    choices = [f"The capital of France is {city}." for city in ("Berlin", "Madrid", "Paris", "Rome")]
    text = server.post("/v1/chat/completions", {**body, "guided_choice": choices})["choices"][0]["message"]["content"]
    yield "choice", text == choices[2], text
    for path, body in _TOOL_REQUESTS.items():
        answer = server.answer(path, body)
        text = answer.json()["error"]["message"] if answer.is_client_error else answer.text
        yield f"tools, {path}", answer.status_code == 400 and "tools" in text, text


def _completions(server: Server) -> Iterator[Finding]:
    body: dict[str, Any] = {
        "prompt": "\n".join([*(turn["content"] for turn in _EXAMPLE), _FACT, ""]),
        "temperature": 0,
        "max_tokens": 60,
    }
    text = server.post("/v1/completions", {**body, "guided_json": _SCHEMA})["choices"][0]["text"]
    yield "JSON schema", _is_fact(text), text
    body = {"prompt": "The capital of Germany is", "temperature": 0}
    choices = [" Paris", " Madrid", " Berlin", " Rome"]
    text = server.post("/v1/completions", {**body, "guided_choice": choices})["choices"][0]["text"]
    yield "choice", text == " Berlin", text
    answer = server.answer("/v1/chat/completions", {"messages": _WEATHER})
    yield "a chat without a template", answer.status_code == 400, answer.json()["error"]["message"]


def _forced_call(server: Server) -> Finding:
    body = _TOOL_REQUESTS["/v1/chat/completions"]
    body = {**body, "tool_choice": "required", "temperature": 0, "max_tokens": 100}
    [call] = server.post("/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]
    text = str(call["function"]["arguments"])
    is_right = call["function"]["name"] == _NAME and "Paris" in str(json.loads(text).get("city"))
    return "forced call, by a template that shows tools", is_right, f"{call['function']['name']} {text}"


def _is_fact(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["country", "capital"] and "France" in found["country"] and "Paris" in found["capital"]
