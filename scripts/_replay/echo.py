"""The form in which each client, known by its user-agent, was seen to send a reply back. Pure."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from .wire import CHAT, MESSAGES, RESPONSES, Item, Protocol, json_object

Alter = Callable[[list[Item], Sequence[dict[str, Any]]], list[Item]]  # a turn, and the tools that were offered


def verbatim(turn: list[Item], tools: Sequence[dict[str, Any]] = ()) -> list[Item]:
    return turn


def alteration(protocol: Protocol, user_agent: str) -> Alter:
    client = user_agent.lower()
    if protocol is MESSAGES:
        return _schema_order if "claude" in client else verbatim
    if protocol is RESPONSES:
        return verbatim if "codex" in client else _compact_items
    if protocol is CHAT and "qwen" in client:
        return _trimmed_reasoning
    if protocol is CHAT and "continue" in client:
        return _without_reasoning
    return _compact_calls


def _compact(arguments: str) -> str:
    return json.dumps(json_object(arguments), ensure_ascii=False, separators=(",", ":"))


def _compact_calls(turn: list[Item], tools: Sequence[dict[str, Any]]) -> list[Item]:
    """Read and write arguments again, in their order."""
    return [{**message, **_rewritten(message)} for message in turn]


def _rewritten(message: Item) -> Item:
    calls = message.get("tool_calls")
    if not calls:
        return {}
    return {
        "tool_calls": [
            {**call, "function": {**call["function"], "arguments": _compact(call["function"]["arguments"])}}
            for call in calls
        ]
    }


def _trimmed_reasoning(turn: list[Item], tools: Sequence[dict[str, Any]]) -> list[Item]:
    return [
        {**message, "reasoning_content": message["reasoning_content"].removesuffix("\n")}
        if "reasoning_content" in message
        else message
        for message in _compact_calls(turn, tools)
    ]


def _without_reasoning(turn: list[Item], tools: Sequence[dict[str, Any]]) -> list[Item]:
    kept = _compact_calls(turn, tools)
    return [{name: value for name, value in message.items() if name != "reasoning_content"} for message in kept]


def _compact_items(turn: list[Item], tools: Sequence[dict[str, Any]]) -> list[Item]:
    return [
        {**item, "arguments": _compact(item["arguments"])} if item.get("type") == "function_call" else item
        for item in turn
    ]


def _schema_order(turn: list[Item], tools: Sequence[dict[str, Any]]) -> list[Item]:
    """Put arguments in the order of the tool's schema, and the defaults that it names ahead of the rest."""
    schemas = {tool.get("name"): (tool.get("input_schema") or {}).get("properties") or {} for tool in tools}
    return [{**message, "content": [_ordered(block, schemas) for block in message["content"]]} for message in turn]


def _ordered(block: Item, schemas: dict[Any, dict[str, Any]]) -> Item:
    if block["type"] != "tool_use":
        return block
    schema, given = schemas.get(block["name"], {}), block["input"]
    defaults = {name: rule["default"] for name, rule in schema.items() if "default" in rule and name not in given}
    known = {name: given[name] for name in schema if name in given}
    return {**block, "input": {**defaults, **known, **given}}
