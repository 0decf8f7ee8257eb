"""`/v1/models` says what a model takes and writes, as its checkpoint and settings have it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rows import cases
from tests.support.tokenizers import TEMPLATES
from tests.support.vision_checkpoints import write_vision_checkpoint

from .watched import engine_served

QWEN = (TEMPLATES / "qwen3.jinja").read_text()
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
HERMES: Any = {"chat_template": QWEN, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
CASES: Any = {
    "text": ("qwen3", HERMES, ["tools", "reasoning"]),
    "vision, no tools in its template": (
        "qwen3_vl",
        {**HERMES, "chat_template": None},
        ["images", "videos", "reasoning"],
    ),
    "vision, text only": ("qwen3_vl", {**HERMES, "text_only": True}, ["tools", "reasoning"]),
    "no tools in the template": ("qwen3", {**HERMES, "chat_template": PLAIN}, ["reasoning"]),
    "calls are not read": ("qwen3", {**HERMES, "tool_call_parser": "none"}, ["reasoning"]),
    "reasoning is not read": ("qwen3", {**HERMES, "reasoning_parser": "none"}, ["tools"]),
}
TOOLS: Any = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
IMAGE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("name", cases(CASES, ("text", "vision, no tools in its template", "no tools in the template")))
def test_capabilities_are_those_of_the_checkpoint_and_its_settings(
    checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    family, settings, told = CASES[name]
    path = checkpoint(family) if family == "qwen3" else write_vision_checkpoint(tmp_path / "model", family)
    with engine_served(path, **settings) as server, server.http() as client:
        card = client.get("/v1/models").json()["data"][0]
        assert card["capabilities"] == told == client.get("/v1/models/tiny").json()["capabilities"]
        body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        answer = client.post("/v1/chat/completions", json=body | {"tools": TOOLS})
        assert answer.status_code == (400 if "no tools" in name else 200)
        answer = client.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": [IMAGE]}]})
        assert ("takes no images" in answer.text) is ("images" not in told)
