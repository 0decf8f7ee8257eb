"""Requests in the form of front ends that cannot be run here: editors, a chat in the browser, agents without a package.

The forms follow what their users recorded, and what the public sources of Open WebUI, Crush and Kimi Code write.
"""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.running import Running, serving
from vllm_mlx.core.messages import ImagePart, ReasoningPart, ToolCallPart, ToolResultPart
from vllm_mlx.core.request import Request
from vllm_mlx.server.request_log import UNKNOWN_HEADER

from .image_engine import ImageEngine

CHAT = "/v1/chat/completions"


def picture() -> str:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


TOOL: Any = {
    "type": "function",
    "function": {"name": "view", "description": "Reads.", "parameters": {"type": "object"}},
}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "view", "arguments": '{"path":"a"}'}}
IMAGE: Any = {"type": "image_url", "image_url": {"url": picture()}}
STREAM: Any = {"stream": True, "stream_options": {"include_usage": True}}
SYSTEM: Any = {"role": "system", "content": "rules"}
CALLED: Any = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]}
RESULT: Any = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
FORMS: dict[str, Any] = {
    "xcode": {"messages": [SYSTEM, {"role": "user", "content": [text("file"), text("why?")]}], "tools": [], **STREAM},
    "open webui": {
        "messages": [{"role": "user", "content": [text("what is this?"), IMAGE]}],
        "temperature": 0.7, "top_p": 0.9, "max_tokens": 64, **STREAM,
    },
    "open webui, title": {
        "messages": [{"role": "user", "content": "Name this chat."}], "stream": False, "max_completion_tokens": 50,
    },
    "crush": {
        "messages": [SYSTEM, {"role": "user", "content": [text("look"), IMAGE]}, CALLED, RESULT],
        "tools": [TOOL], "tool_choice": "auto", "max_tokens": 64, "reasoning_effort": "medium", **STREAM,
    },
    "kimi": {
        "messages": [SYSTEM, {"role": "user", "content": "look"}, CALLED, {**RESULT, "content": [text("x")]}],
        "tools": [TOOL], "max_tokens": 64, "reasoning_effort": "medium", "prompt_cache_key": "session", **STREAM,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(ImageEngine(), served_model_names=("org/tiny",)) as running:
        yield running


def parts_of(request: Request, kind: type) -> list[Any]:
    return [part for message in request.messages or () for part in message.parts if isinstance(part, kind)]


@pytest.mark.parametrize("form", FORMS)
def test_a_request_in_the_form_of_a_front_end_is_answered_and_nothing_of_it_is_left_out(
    server: Running, http: httpx.Client, form: str
) -> None:
    body = {"model": "org/tiny", **FORMS[form]}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200 and UNKNOWN_HEADER not in answer.headers, answer.text
    if body["stream"]:
        assert '"usage":{"prompt_tokens":7' in answer.text and answer.text.endswith("data: [DONE]\n\n")
    request = server.engine.requests[-1]
    sent = str(body["messages"])
    assert len(parts_of(request, ImagePart)) == sent.count("'type': 'image_url'")
    assert [len(parts_of(request, kind)) for kind in (ReasoningPart, ToolCallPart, ToolResultPart)] == [
        sent.count("reasoning_content"), sent.count("tool_calls"), sent.count("tool_call_id"),
    ]  # fmt: skip


def test_xcode_finds_the_models_with_an_empty_query_and_an_empty_key(server: Running) -> None:
    with server.http(headers={"authorization": "Bearer"}) as client:
        answer = client.get("/v1/models?")
    assert answer.status_code == 200 and [card["id"] for card in answer.json()["data"]] == ["org/tiny"]
