"""Sessions of four coding agents over a socket, in the shape that each sends: reasoning in its field, and cached turns.

The clients themselves are run outside the gate, by scripts/accept-clients; bodies of opencode, Kilo Code and Claude
Code were recorded there. aichat is in no registry that could be reached: its requests are as its source writes them.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import httpx
import pytest

from tests.server.watched import engine_served
from tests.support.rote import rote_checkpoint
from tests.support.rows import row
from tests.support.running import Running, eventually
from tests.support.tokenizers import TEMPLATES
from vllm_mlx.cli.clients import CLIENTS
from vllm_mlx.cli.remote import events_of

from .agent import prose

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "path": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "edit", "parameters": PARAMETERS}}
CUSTOM = {"name": "edit", "input_schema": PARAMETERS}
TEMPLATE = (TEMPLATES / "qwen3.jinja").read_text()
SYSTEM, QUESTION, RESULT = prose(20), prose(3, 1), prose(3, 2)


@pytest.fixture(scope="module", params=[True, False], ids=["the reply opens reasoning", "the prompt does"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("agents")
    path = rote_checkpoint(folder, "qwen3", thought_tokens=12, opens_thought=request.param)
    template = TEMPLATE if request.param else f"{TEMPLATE}{{% if add_generation_prompt %}}<think>\n{{% endif %}}"
    with engine_served(path, chat_template=template, tool_call_parser="hermes", tool_grammar="off") as running:
        yield running


class ChatAgent:
    """Chat completions as opencode sends them: reasoning goes back, and arguments are serialized again."""

    question: Any = QUESTION
    fields: Mapping[str, Any] = {
        "max_tokens": 500,
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
    }

    def __init__(self) -> None:
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.question}]

    def turn(self, client: httpx.Client) -> tuple[str, str]:
        """Ask, and add the reply and the results of its calls. Returns reasoning and content."""
        body = {"model": "tiny", "messages": self.messages, "tools": [FUNCTION], "stream": True, **self.fields}
        events = sse(client.post("/v1/chat/completions", json=body))
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        assert reasoning == "".join(delta.get("reasoning") or "" for delta in deltas)
        content = "".join(delta.get("content") or "" for delta in deltas)
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or ()]
        arguments = json.loads("".join(piece["function"].get("arguments") or "" for piece in pieces))
        assert arguments == {"text": "x", "path": "a.py"}
        self.messages += self.reply(reasoning, content, pieces[0]["id"], pieces[0]["function"]["name"], arguments)
        return reasoning, content

    def reply(self, reasoning: str, content: str, call_id: str, name: str, arguments: Any) -> list[Any]:
        """Return the reply and the result of its call as the client sends them back."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": compact(arguments)}}
        reply = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [call]}
        return [reply, {"role": "tool", "tool_call_id": call_id, "content": RESULT}]


class Kilo(ChatAgent):
    """Its question comes in two parts, the second with the time and the folder."""

    question = (
        {"type": "text", "text": QUESTION},
        {"type": "text", "text": "\n\n<environment_details>\nWorking directory: /work\n</environment_details>"},
    )


class Aichat(ChatAgent):
    """It sends back neither reasoning nor the content beside a call, serializes results as JSON, and sets no limit."""

    fields: Mapping[str, Any] = {}

    def reply(self, reasoning: str, content: str, call_id: str, name: str, arguments: Any) -> list[Any]:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": compact(arguments)}}
        result = {"role": "tool", "content": compact({"output": RESULT}), "tool_call_id": call_id}
        return [{"role": "assistant", "tool_calls": [call]}, result]


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class MessagesAgent:
    """Messages, with thinking blocks, which go back with their signatures."""

    def __init__(self) -> None:
        self.messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]

    def turn(self, client: httpx.Client) -> tuple[str, str]:
        body = {
            "model": "tiny",
            "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
            "messages": self.messages,
            "tools": [CUSTOM],
            "max_tokens": 500,
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "stream": True,
        }
        blocks: list[dict[str, Any]] = []
        for event in sse(client.post("/v1/messages?beta=true", json=body)):
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                name = {"input_json_delta": "json", "signature_delta": "signature"}.get(delta["type"])
                name = name or delta["type"].removesuffix("_delta")
                blocks[-1][name] = blocks[-1].get(name, "") + delta.get("partial_json", delta.get(name, ""))
        for block in blocks:
            written = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(written)
        [thinking] = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        [call_id] = [block["id"] for block in blocks if block["type"] == "tool_use"]
        self.messages.append({"role": "assistant", "content": blocks})
        result = {"type": "tool_result", "tool_use_id": call_id, "content": RESULT}
        self.messages.append({"role": "user", "content": [result]})
        return thinking, "".join(block["text"] for block in blocks if block["type"] == "text")


def sse(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return list(events_of(answer.text.splitlines()))


AGENTS = {"claude": MessagesAgent, "opencode": ChatAgent, "kilo": Kilo, "aichat": Aichat}


@row("S0-18")
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_reasoning_in_its_field_and_goes_on_from_the_cache(server: Running, name: str) -> None:
    assert name in CLIENTS, "launch configures it"
    agent = AGENTS[name]()
    with server.http() as client:
        client.delete("/v1/cache")
        known = 0
        for number in range(3):
            before = num_replies(client)
            reasoning, content = agent.turn(client)
            assert (reasoning, content.strip()) == ("ABCDEFGHIJKL", ""), "all of it, and no tag"
            eventually(partial(has_more, client, before))
            reply = client.get("/v1/status").json()["last_replies"][0]
            assert reply["cached_tokens"] >= known - 2, f"turn {number}"
            known = reply["prompt_tokens"] + reply["completion_tokens"]


def num_replies(client: httpx.Client) -> int:
    return client.get("/v1/status").json()["total_requests_processed"]


def has_more(client: httpx.Client, before: int) -> bool:
    return num_replies(client) > before
