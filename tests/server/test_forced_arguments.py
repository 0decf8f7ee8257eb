"""Forced calls of a served model have declared arguments alone, at every depth, whatever its format of calls."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .watched import engine_served

DIGIT: Any = {"type": "integer", "minimum": 0, "maximum": 9}
INNER: Any = {"type": "object", "properties": {"b": DIGIT}}
OUTER: Any = {"type": "object", "properties": {"a": DIGIT, "o": INNER}, "required": ["o"]}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": OUTER}}


def names_in(arguments: str) -> list[str]:
    found: list[str] = []
    json.loads(arguments, object_pairs_hook=lambda pairs: found.extend(name for name, _ in pairs))
    return found


@pytest.mark.parametrize("parser", ["hermes", "qwen3_xml", "lfm2"])
def test_over_http(checkpoint: Callable[..., Path], parser: str) -> None:
    """As JSON, as tags and as Python calls; a name comes once in the text that the client gets."""
    choice = {"type": "function", "function": {"name": "f"}}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    with (
        engine_served(checkpoint("qwen3"), max_model_len=2048, tool_call_parser=parser) as running,
        running.http() as http,
    ):
        for seed in range(2):
            asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": choice}
            reply = http.post("/v1/chat/completions", json={**asked, **off, "max_tokens": 400, "seed": seed})
            assert reply.status_code == 200, reply.text
            [call] = reply.json()["choices"][0]["message"]["tool_calls"]
            found = names_in(call["function"]["arguments"])
            assert sorted(found) == sorted({*found} & {"a", "o", "b"}), call
