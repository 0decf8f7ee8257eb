"""Recorded sessions, one JSON object a line and one request each, and the three protocols as a client sees them.

Fields of a line: `session`, `t` (seconds since its session began), `method`, `endpoint`, `headers`, `fault` (the status
with which the recording server refused it, or null) and `body`. A conversation is a list of items: messages, or what
Responses calls items. A turn is the items of one reply. Nothing here sends anything.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

Item = dict[str, Any]


@dataclass(slots=True)
class Reply:
    """A streamed reply. The server counted the tokens."""

    turn: list[Item] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    is_stopped: bool = False  # by the model; False: cut by its length


class Protocol(Interface):
    items: str  # the body's field that holds the conversation
    max_tokens: tuple[str, ...]  # its fields that limit the reply

    def is_reply(self, item: Item) -> bool: ...

    def feed(self, reply: Reply, event: dict[str, Any]) -> bool:
        """Take an event. Return whether it shows the user something."""
        ...

    def calls(self, turn: Sequence[Item]) -> list[str]:
        """Return the ids of a turn's calls."""
        ...


class Chat:
    items: str = "messages"
    max_tokens: tuple[str, ...] = ("max_completion_tokens", "max_tokens")

    def is_reply(self, item: Item) -> bool:
        return item.get("role") == "assistant"

    def feed(self, reply: Reply, event: dict[str, Any]) -> bool:
        if usage := event.get("usage"):
            reply.prompt_tokens, reply.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)  # others omit a 0
        shows = False
        for choice in event.get("choices", ()):
            reply.is_stopped |= choice.get("finish_reason") in ("stop", "tool_calls")
            shows |= self._take(reply, choice["delta"])
        return shows

    def _take(self, reply: Reply, delta: dict[str, Any]) -> bool:
        if not reply.turn:
            reply.turn.append({"role": "assistant", "content": ""})
        message = reply.turn[0]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                function = {"name": part["function"].get("name", ""), "arguments": ""}
                calls.append({"id": part.get("id"), "type": "function", "function": function})
            calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""
        return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))

    def calls(self, turn: Sequence[Item]) -> list[str]:
        return [call["id"] for item in turn for call in item.get("tool_calls") or ()]


class Messages:
    items: str = "messages"
    max_tokens: tuple[str, ...] = ("max_tokens",)

    def is_reply(self, item: Item) -> bool:
        return item.get("role") == "assistant"

    def feed(self, reply: Reply, event: dict[str, Any]) -> bool:
        match event.get("type"):
            case "message_start":
                reply.turn = [{"role": "assistant", "content": []}]
            case "content_block_start":
                reply.turn[0]["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                return self._take(reply.turn[0]["content"][event["index"]], event["delta"])
            case "content_block_stop":
                block = reply.turn[0]["content"][event["index"]]
                text = block.pop("json")
                if block["type"] == "tool_use":
                    block["input"] = json_object(text)
            case "message_delta":
                self._end(reply, event)
        return False

    def _take(self, block: Item, delta: dict[str, Any]) -> bool:
        names = {"text_delta": ("text", "text"), "thinking_delta": ("thinking", "thinking")}
        names |= {"signature_delta": ("signature", "signature"), "input_json_delta": ("json", "partial_json")}
        mine, theirs = names[delta["type"]]
        block[mine] = block.get(mine, "") + delta[theirs]
        return bool(delta[theirs]) and mine != "signature"

    def _end(self, reply: Reply, event: dict[str, Any]) -> None:
        usage = event["usage"]
        reply.cached_tokens = usage.get("cache_read_input_tokens") or 0
        written = usage.get("cache_creation_input_tokens") or 0
        reply.prompt_tokens = usage["input_tokens"] + reply.cached_tokens + written
        reply.completion_tokens = usage["output_tokens"]
        reply.is_stopped = event["delta"]["stop_reason"] in ("end_turn", "tool_use")

    def calls(self, turn: Sequence[Item]) -> list[str]:
        return [block["id"] for item in turn for block in blocks(item) if block["type"] == "tool_use"]


class Responses:
    items: str = "input"
    max_tokens: tuple[str, ...] = ("max_output_tokens",)

    def is_reply(self, item: Item) -> bool:
        return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call", "custom_tool_call")

    def feed(self, reply: Reply, event: dict[str, Any]) -> bool:
        match event.get("type"):
            case "response.output_item.done":
                reply.turn.append(event["item"])
            case "response.completed" | "response.incomplete":
                usage = event["response"]["usage"]
                reply.prompt_tokens, reply.completion_tokens = usage["input_tokens"], usage["output_tokens"]
                reply.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
                reply.is_stopped = event["type"] == "response.completed"
            case str(kind) if kind.endswith(".delta"):
                return bool(event.get("delta"))
        return False

    def calls(self, turn: Sequence[Item]) -> list[str]:
        return [item["call_id"] for item in turn if item.get("type") in ("function_call", "custom_tool_call")]


CHAT, MESSAGES, RESPONSES = Chat(), Messages(), Responses()
_BY_ENDPOINT: dict[str, Protocol] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


def blocks(item: Item) -> list[Item]:
    """Return a message's content as blocks, also if it was sent as a text."""
    content = item.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def json_object(text: str) -> dict[str, Any]:
    """Return the arguments as an object, empty if they cannot be read, as a client sends them back."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


_FIELDS = ("session", "t", "method", "endpoint")


class ReplayError(Exception):
    """The trace cannot be played. The message says why."""


@dataclass(frozen=True, slots=True)
class Recorded:
    number: int  # in the file
    session: str
    at_s: float
    method: str
    endpoint: str
    headers: dict[str, str]
    body: dict[str, Any] | None

    @property
    def protocol(self) -> Protocol | None:
        """Return the protocol, or None if the request asks for no reply or its body does not fit its endpoint."""
        protocol = _BY_ENDPOINT.get(self.endpoint.partition("?")[0]) if self.body is not None else None
        return protocol if protocol is not None and isinstance((self.body or {}).get(protocol.items), list) else None

    @property
    def thread(self) -> str:
        """Return the client's thread, which sends one request at a time: its main loop, a sub-agent, a title."""
        if self.protocol is None or self.body is None:
            return f"request {self.number}"
        tools = [tool.get("name") or tool.get("function", {}).get("name") for tool in self.body.get("tools") or ()]
        return f"{self.headers.get('x-claude-code-agent-id')} {bool(tools)}"


def load(path: Path, sessions: Iterable[str] = ()) -> list[Recorded]:
    """Return the requests in the order of the file: those of the named sessions, or all."""
    wanted = set(sessions)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = [_recorded(number, line) for number, line in enumerate(lines, 1)]
    missing = wanted - {each.session for each in found}
    if missing:
        names = ", ".join(dict.fromkeys(each.session for each in found))
        raise ReplayError(f"{path} has no session {', '.join(sorted(missing))}. It has: {names}")
    return [each for each in found if not wanted or each.session in wanted]


def _recorded(number: int, line: str) -> Recorded:
    try:
        row = json.loads(line)
        session, at_s, method, endpoint = (row[name] for name in _FIELDS)
    except (ValueError, KeyError, TypeError) as error:
        raise ReplayError(f"Line {number} is no recorded request: {error!r}") from error
    return Recorded(number, session, float(at_s), method, endpoint, row.get("headers") or {}, row.get("body"))
