"""A server that is started again: prompts with tools, reasoning and images, and stored responses, go on."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import Running, serving, slowly
from tests.support.shapes import draw_shape
from vllm_mlx.api.openai.decode import ReplySpec, decode_chat
from vllm_mlx.api.openai.schema import ChatCompletionBody
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.events import Finished
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import open_disk, start_engine

from ..media.samples import encode

PNG = "data:image/png;base64," + base64.b64encode(encode(draw_shape("red", "circle", 112))).decode()
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
KEYS = ("first", "second")


@contextmanager
def started(folder: Path, model: str, **settings: Any) -> Iterator[Running]:
    with serving(engine_in(folder, model), **settings) as running:
        yield running


def engine_in(folder: Path, model: str) -> EngineClient:
    config = EngineConfig(
        model=model, memory_budget_bytes=2 << 30, max_model_len=4096, cache_dir=str(folder), cache_disk_bytes=1 << 33
    )
    return start_engine(config, open_disk(config))


@pytest.fixture
def small(checkpoint: Callable[..., Path]) -> str:
    """It sees no images, and starts in a quarter of the demo's time."""
    return str(checkpoint("qwen3"))


def database(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("index.sqlite*"))


def post(running: Running, path: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
    with running.http(headers={"authorization": f"Bearer {key}"} if key else {}) as http:
        reply = http.post(path, json={"temperature": 0, "max_tokens": 40, **body} if "messages" in body else body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def answered(running: Running, messages: list[dict[str, Any]], salt: str) -> tuple[int, int]:
    """Ask for a reply, which joins the conversation. Returns the tokens of the prompt, and how many were cached."""
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 60, "cache_salt": salt}
    reply = post(running, "/v1/chat/completions", body)
    said, usage = reply["choices"][0]["message"], reply["usage"]
    assert "cache_shortfall" not in usage
    messages.append({name: said[name] for name in ("role", "content", "tool_calls") if said.get(name)})
    messages.append({"role": "user", "content": "And now?"})
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_restart_between_turns_costs_no_cached_token(tmp_path: Path) -> None:
    """With an image, and replies that come back without their reasoning. Two conversations share nothing."""
    rules = " ".join(f"Rule {number}: be kind to {7 * number}." for number in range(60))
    shown = {"type": "image_url", "image_url": {"url": PNG}}
    question = {"role": "user", "content": [{"type": "text", "text": "What is in this image?"}, shown]}
    lasting, restarted = ([{"role": "system", "content": rules}, question] for _ in range(2))
    with started(tmp_path, "demo") as running:
        expected = [answered(running, lasting, "lasting") for _ in range(2)]
        found = [answered(running, restarted, "restarted")]
    with started(tmp_path, "demo") as running:
        found.append(answered(running, restarted, "restarted"))
    assert (restarted, found) == (lasting, expected)
    assert all(num_cached > 0.95 * num_tokens for num_tokens, num_cached in found[1:])


def test_a_reply_that_ends_while_the_server_drains_is_remembered(tmp_path: Path, small: str) -> None:
    engine = engine_in(tmp_path, small)
    body = {"messages": [{"role": "user", "content": "Say: hello"}], "temperature": 0, "max_tokens": 40}
    reply = ReplySpec(reply_id="r", model="", created=0)
    request = decode_chat(ChatCompletionBody.model_validate(body), reply).request

    async def main() -> None:
        async with await engine.submit(request) as generation:
            stopping = asyncio.create_task(engine.shutdown(60))
            assert isinstance([event async for _, event in generation][-1], Finished)
        await stopping

    asyncio.run(main())
    assert b"replies.1" in database(tmp_path)


def test_stored_responses_go_on(tmp_path: Path, small: str) -> None:
    fields = {"temperature": 0, "max_output_tokens": 40}
    with started(tmp_path, small, api_keys=KEYS) as running:
        first = post(running, "/v1/responses", {"input": "Say: hello", **fields}, "first")
        body = {"input": "Again.", "previous_response_id": first["id"], **fields}
        second = post(running, "/v1/responses", body, "first")
        gone = post(running, "/v1/responses", {"input": "hi", **fields}, "first")
        with running.http(headers={"authorization": "Bearer first"}) as http:
            assert http.delete(f"/v1/responses/{gone['id']}").status_code == 200
            items = http.get(f"/v1/responses/{second['id']}/input_items").json()
        body = {"input": "And again.", "previous_response_id": second["id"], **fields}
        third = post(running, "/v1/responses", body, "first")
    with started(tmp_path, small, api_keys=KEYS) as running:
        again = post(running, "/v1/responses", body, "first")
        assert [item["content"] for item in again["output"]] == [item["content"] for item in third["output"]]
        with running.http(headers={"authorization": "Bearer first"}) as http:
            assert http.get(f"/v1/responses/{first['id']}").json() == first
            assert http.get(f"/v1/responses/{second['id']}/input_items").json() == items
            assert http.get(f"/v1/responses/{gone['id']}").status_code == 404
        with running.http(headers={"authorization": "Bearer second"}) as http:
            assert http.get(f"/v1/responses/{first['id']}").status_code == 404
            body["input"] = "x"
            assert http.post("/v1/responses", content=json.dumps(body)).status_code == 400
    content = database(tmp_path)
    assert gone["id"].encode() not in content and first["id"].encode() in content


def test_a_response_that_had_not_ended_has_failed(tmp_path: Path, small: str) -> None:
    with started(tmp_path, small) as running, slowly(running):
        body = {"input": "Count.", "background": True, "max_output_tokens": 3000, "temperature": 0}
        begun = post(running, "/v1/responses", body)
        memories = running.engine.memories
        assert memories.journals.flush()
        content = {file: file.read_bytes() for file in tmp_path.glob("index.sqlite*") if file.suffix != ".sqlite-shm"}
    for file, left in content.items():  # as a kill would have left it
        file.write_bytes(left)
    assert b'"status":"completed"' not in b"".join(content.values())
    with started(tmp_path, small) as running, running.http() as http:
        found = http.get(f"/v1/responses/{begun['id']}").json()
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


def test_memories_of_a_tenant_are_cleared_alone(tmp_path: Path, small: str) -> None:
    with started(tmp_path, small, api_keys=KEYS) as running:
        for name in KEYS:
            said = {"messages": [{"role": "user", "content": f"I am {name}."}]}
            post(running, "/v1/chat/completions", said, name)
        replies = running.engine.memories.replies
        assert running.engine.memories.journals.flush() and len(replies) == 2
        with running.http(headers={"authorization": "Bearer second"}) as http:
            assert http.delete("/v1/cache").status_code == 200
        assert len(replies) == 1
