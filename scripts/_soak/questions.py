"""Greedy questions and their replies when nothing else runs: text, long replies, images, tools, conversations."""

import asyncio
import base64
import io
from typing import Any

import httpx

from tests.support.harm.values import dumps
from tests.support.harm.wire import request
from tests.support.shapes import draw_shape

CHAT = "/v1/chat/completions"
PATIENCE_S = 900  # of a client, on a machine that does much else
Body = dict[str, Any]

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def shown(color: str, shape: str) -> Body:
    file = io.BytesIO()
    draw_shape(color, shape, 112).save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


def user(*content: str | Body) -> Body:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


def greedy(*messages: Body, max_tokens: int = 24, **fields: Any) -> Body:
    return {"messages": list(messages), "temperature": 0, "max_tokens": max_tokens, **fields}


QUESTIONS: dict[str, Body] = {
    "france": greedy(user("What is the capital of France?")),
    "count": greedy(user("Count to five.")),
    "names": greedy(user("Say hello to Anna and to Ben.")),
    "larger": greedy(user("Which is larger, 12 or 21?")),
    "backwards": greedy(user("Write the word tree backwards.")),
    "colours": greedy(user("List three colours. " * 20)),
    "long prompt": greedy(user("The fox sees the river and the hill. " * 80 + "What does the fox see?")),
    "long reply": greedy(user("What is 2 + 3?"), max_tokens=600, ignore_eos=True),
    "two replies": greedy(user("What is 4 + 3?"), n=2),
    "circle": greedy(user("What is in this image?", shown("red", "circle"))),
    "star": greedy(user("What is in this image?", shown("blue", "star"))),
    "pictures": greedy(user("What is in these images?", shown("green", "square"), shown("yellow", "triangle"))),
    "tools": greedy(user("How is the weather in Rome?"), max_tokens=64, tools=TOOLS),
    "tool result": greedy(
        user("How is the weather in Rome?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        tools=TOOLS,
    ),
    "talk": greedy(
        user("What is in this image?", shown("red", "circle")),
        {"role": "assistant", "content": "A red circle."},
        user("What is 3 + 4?"),
    ),
}  # fmt: skip


def said(choices: list[Any]) -> list[Any]:
    """Return the parts of a reply that are equal each time: all but the ids of calls."""
    return [
        (
            choice["message"].get("content"),
            choice["message"].get("reasoning_content"),
            [call["function"] for call in choice["message"].get("tool_calls") or []],
            choice["finish_reason"],
        )
        for choice in choices
    ]


def oracles(http: httpx.Client) -> dict[str, list[Any]]:
    """Return the reply to each question when nothing else runs."""
    return {name: _oracle(http, name, body) for name, body in QUESTIONS.items()}


def _oracle(http: httpx.Client, name: str, body: Body) -> list[Any]:
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, f"{name}: {answer.text}"
    return said(answer.json()["choices"])


async def ask(port: int, body: Body | bytes, key: str = "none") -> int:
    """Read a reply to its end, over a connection of its own. Return the status, or 0 without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(CHAT, body if isinstance(body, bytes) else dumps(body), key))
        await writer.drain()
        words = (await reader.readline()).split()
        status, seen = int(words[1]) if words else 0, b""
        while status == 200 and not (b"[DONE]" in seen or b'"usage"' in seen):
            if not (part := await reader.read(65536)):
                break
            seen = seen[-16:] + part
        return status
    finally:
        writer.close()
