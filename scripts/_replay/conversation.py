"""Recorded conversations with this server's replies in the place of the recorded ones, altered as each client does.

A client is known by its user-agent. Nothing here sends anything.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .trace import CHAT, MESSAGES, RESPONSES, Item, Protocol, Recorded, Reply, blocks, json_object

Alter = Callable[[Item, Sequence[dict[str, Any]]], Item]  # an item of a turn, and the tools that were offered


def verbatim(item: Item, tools: Sequence[dict[str, Any]] = ()) -> Item:
    return item


def alteration(protocol: Protocol, user_agent: str) -> Alter:
    client = user_agent.lower()
    if protocol is MESSAGES:
        return _schema_order if "claude" in client else verbatim
    if protocol is RESPONSES:
        return verbatim if "codex" in client else _compact_item
    if protocol is CHAT and "qwen" in client:
        return _trimmed_reasoning
    if protocol is CHAT and "continue" in client:
        return _without_reasoning
    return _compact_calls


def _compact(arguments: str) -> str:
    return json.dumps(json_object(arguments), ensure_ascii=False, separators=(",", ":"))


def _compact_calls(message: Item, tools: Sequence[dict[str, Any]]) -> Item:
    """Read and write arguments again, in their order."""
    if not (calls := message.get("tool_calls")):
        return message
    functions = [{**call["function"], "arguments": _compact(call["function"]["arguments"])} for call in calls]
    return {**message, "tool_calls": [{**call, "function": f} for call, f in zip(calls, functions, strict=True)]}


def _trimmed_reasoning(message: Item, tools: Sequence[dict[str, Any]]) -> Item:
    message = _compact_calls(message, tools)
    if "reasoning_content" not in message:
        return message
    return {**message, "reasoning_content": message["reasoning_content"].removesuffix("\n")}


def _without_reasoning(message: Item, tools: Sequence[dict[str, Any]]) -> Item:
    return {name: value for name, value in _compact_calls(message, tools).items() if name != "reasoning_content"}


def _compact_item(item: Item, tools: Sequence[dict[str, Any]]) -> Item:
    return {**item, "arguments": _compact(item["arguments"])} if item.get("type") == "function_call" else item


def _schema_order(message: Item, tools: Sequence[dict[str, Any]]) -> Item:
    """Put arguments in the order of the tool's schema, and the defaults that it names ahead of the rest."""
    schemas = {tool.get("name"): (tool.get("input_schema") or {}).get("properties") or {} for tool in tools}
    return {**message, "content": [_ordered(block, schemas) for block in message["content"]]}


def _ordered(block: Item, schemas: dict[Any, dict[str, Any]]) -> Item:
    if block["type"] != "tool_use":
        return block
    schema, given = schemas.get(block["name"], {}), block["input"]
    defaults = {name: rule["default"] for name, rule in schema.items() if "default" in rule and name not in given}
    known = {name: given[name] for name in schema if name in given}
    return {**block, "input": {**defaults, **known, **given}}


_NOT_SAID = ("cache_control", "id", "status")  # fields of items that change nothing in the prompt


@dataclass(frozen=True, slots=True)
class Bodies:
    """`sent`: with replies as the client alters them; `given`: as they were given."""

    sent: dict[str, Any]
    given: dict[str, Any]
    parents: tuple[int, ...] = ()  # the requests whose replies stand in it, in order


class Conversations:
    """Finds the request that a recorded turn answered: its conversation stands before the turn."""

    def __init__(self, trace: Iterable[Recorded], *, model: str, max_tokens: int | None, echo: bool):
        self._model = model
        self._max_tokens = max_tokens
        self._echo = echo
        self._replies: dict[int, Reply] = {}
        self._asked_by: dict[int, dict[int, int]] = {}  # of a request: where a turn starts -> the request it answered
        asked: dict[bytes, int] = {}  # key of a whole conversation -> the latest request that sent it
        for recorded in trace:
            protocol, body = recorded.protocol, recorded.body
            if protocol is not None and body is not None:
                keys = _keys(body[protocol.items])
                starts = [start for start, _ in _turns(protocol, body[protocol.items])]
                self._asked_by[recorded.number] = {at: asked[keys[at]] for at in starts if keys[at] in asked}
                asked[keys[-1]] = recorded.number

    def parents(self, recorded: Recorded) -> tuple[int, ...]:
        """Return the requests whose replies stand in this one."""
        return tuple(self._asked_by.get(recorded.number, {}).values())

    def answered(self, recorded: Recorded, reply: Reply) -> None:
        if reply.turn:
            self._replies[recorded.number] = reply

    def bodies(self, recorded: Recorded) -> Bodies:
        protocol, body = recorded.protocol, dict(recorded.body or {})
        if "model" in body:
            body["model"] = self._model
        if protocol is None:
            return Bodies(body, body)
        if self._max_tokens is not None:
            _limit(protocol, body, self._max_tokens)
        if not self._echo:
            return Bodies(body, body)
        alter = alteration(protocol, recorded.headers.get("user-agent", ""))
        asked_by = self._asked_by[recorded.number]
        known = {at: self._replies[number] for at, number in asked_by.items() if number in self._replies}
        sent, given = (_with_replies(protocol, body, known, how) for how in (alter, verbatim))
        return Bodies(sent, given, tuple(asked_by[at] for at in known))


def _limit(protocol: Protocol, body: dict[str, Any], max_tokens: int) -> None:
    for name in protocol.max_tokens:
        if name in body or name == protocol.max_tokens[-1]:
            body[name] = min(max_tokens, body.get(name) or max_tokens)
    if (body.get("thinking") or {}).get("type") == "enabled":
        body["thinking"] = {"type": "adaptive"}  # a budget would have to be below the limit


def _with_replies(protocol: Protocol, body: dict[str, Any], known: dict[int, Reply], alter: Alter) -> dict[str, Any]:
    items = body[protocol.items]
    result: list[Item] = []
    position = 0
    for start, end in _turns(protocol, items):
        reply = known.get(start)
        if reply is None:
            continue
        stop = next((n for n in range(end, len(items)) if protocol.is_reply(items[n])), len(items))
        old, new = protocol.calls(items[start:end]), protocol.calls(reply.turn)
        result += items[position:start]
        result += [alter(item, body.get("tools") or ()) for item in reply.turn]
        result += _answered(protocol, items[end:stop], old, new)
        position = stop
    return {**body, protocol.items: [*result, *items[position:]]}


def _turns(protocol: Protocol, items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(items):
        end = start
        while end < len(items) and protocol.is_reply(items[end]):
            end += 1
            if protocol is CHAT or protocol is MESSAGES:
                break
        if end > start:
            yield start, end
        start = max(end, start + 1)


def _keys(items: Sequence[Item]) -> list[bytes]:
    """Return the keys of the first 0, 1, 2… items."""
    digest = hashlib.blake2b(digest_size=16)
    keys = [digest.digest()]
    for item in items:
        digest.update(json.dumps(_told(item), sort_keys=True).encode())
        keys.append(digest.digest())
    return keys


def _told(value: Any) -> Any:
    match value:
        case {"content": str(text), **rest}:
            return _told({**rest, "content": [{"type": "text", "text": text}]})
        case dict():
            return {name: _told(item) for name, item in value.items() if name not in _NOT_SAID}
        case list():
            return [_told(item) for item in value]
    return value


def _answered(protocol: Protocol, items: Sequence[Item], old: list[str], new: list[str]) -> list[Item]:
    """Return the items after a turn, in which the results answer the calls of the reply that replaced it.

    A reply that called nothing is answered with the same words from the user.
    """
    names = dict(zip(old, new, strict=False))
    if protocol is MESSAGES:
        return [_answered_blocks(item, old, names, new) for item in items]
    field = "tool_call_id" if protocol is CHAT else "call_id"
    result: list[Item] = []
    last: Item = {"role": "tool", "content": ""} if protocol is CHAT else {"type": "function_call_output", "output": ""}
    for item in items:
        if item.get(field) not in old:
            result.append(item)
        elif item[field] in names:
            last = item
            result.append({**item, field: names[item[field]]})
        elif not new:
            result.append({"role": "user", "content": _text(item)})
    extra = [{**last, field: name} for name in new[len(old) :]]
    return [*extra, *result]


def _text(item: Item) -> Any:
    return item.get("content", item.get("output"))


def _answered_blocks(item: Item, old: list[str], names: dict[str, str], new: list[str]) -> Item:
    if item.get("role") != "user":
        return item
    result: list[Item] = []
    for block in blocks(item):
        if block.get("tool_use_id") not in old:
            result.append(block)
        elif block["tool_use_id"] in names:
            result.append({**block, "tool_use_id": names[block["tool_use_id"]]})
        elif not new:
            result += [each for each in blocks(block) if each["type"] == "text"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": ""} for name in new[len(old) :]]
    return {**item, "content": [*results, *result]}
