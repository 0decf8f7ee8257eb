"""Decides whether a message from a client repeats a reply that it got, although clients rewrite replies. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

from ..core.messages import MediaPart, Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart, ToolSpec
from ..formats.bodies.tool_schema import resolve
from ..formats.reply import MAX_DEPTH
from ..util.json_values import is_deeper

_MAX_BRANCHES = 64  # subschemas that are examined for one value; a default in any further one is ignored
_ALTERNATIVES = ("allOf", "anyOf", "oneOf")


class DeclaredValue:
    """The subschemas that may describe one value, at any depth of a JSON schema. Invalid subschemas are ignored."""

    def __init__(self, schemas: tuple[Any, ...], root: Mapping[str, Any]):
        self._schemas = schemas
        self._root = root
        self._children: dict[str, DeclaredValue | None] = {}

    def argument(self, name: str) -> "DeclaredValue | None":
        """Return the property `name` of the value; None if no subschema names it."""
        if name not in self._children:
            properties = (branch.get("properties") for branch in self._branches)
            found = tuple(table[name] for table in properties if isinstance(table, Mapping) and name in table)
            if not found:
                return None
            self._children[name] = DeclaredValue(found, self._root)
        return self._children[name]

    @cached_property
    def items(self) -> "DeclaredValue":
        """Return the items of the value, if it is an array."""
        return DeclaredValue(tuple(branch.get("items") for branch in self._branches), self._root)

    def defaults(self) -> Iterator[Any]:
        """Return the declared defaults that nest no deeper than the arguments of a reply may."""
        found = (branch["default"] for branch in self._branches if "default" in branch)
        return (default for default in found if not is_deeper(default, MAX_DEPTH))

    @cached_property
    def _branches(self) -> tuple[Mapping[str, Any], ...]:
        """Return the subschemas, their references and alternatives, each once; `_MAX_BRANCHES` at most."""
        found: dict[int, Mapping[str, Any]] = {}
        waiting = list(islice(self._schemas, _MAX_BRANCHES))
        while waiting and len(found) < _MAX_BRANCHES:
            schema = waiting.pop()
            if not isinstance(schema, Mapping) or id(schema) in found:
                continue
            found[id(schema)] = schema
            if isinstance(reference := schema.get("$ref"), str):
                waiting.append(resolve(reference, self._root))
            for keyword in _ALTERNATIVES:
                if isinstance(branches := schema.get(keyword), list):
                    waiting += islice(branches, _MAX_BRANCHES)
        return tuple(found.values())


def declared_arguments(tools: Iterable[ToolSpec]) -> dict[str, DeclaredValue]:
    """Return the declared arguments of each tool, by its name."""
    return {
        tool.name: DeclaredValue((tool.parameters,), tool.parameters) for tool in tools if tool.parameters is not None
    }


_NO_TOOLS: Mapping[str, DeclaredValue] = {}


def is_echo(message: Message, reply: Message, tools: Mapping[str, DeclaredValue] = _NO_TOOLS) -> bool:
    """Return whether the message repeats the reply. White space around texts and the order of arguments may differ.

    The reasoning may be missing. A call with the same id may have additional arguments if each has the default that
    its tool in `tools` declares, since clients fill these in. Any other addition is an edit.
    """
    if message.role != "assistant" or any(isinstance(part, MediaPart | ToolResultPart) for part in message.parts):
        return False
    reasoning = reasoning_of(message)
    return (
        text_of(message) == text_of(reply)
        and (not reasoning or reasoning == reasoning_of(reply))
        and _are_same_calls(calls_of(message), calls_of(reply), tools)
    )


def is_same(message: Message, reply: Message) -> bool:
    """Return whether both say the same, as `is_echo` does, with the same reasoning."""
    return (
        text_of(message) == text_of(reply)
        and reasoning_of(message) == reasoning_of(reply)
        and _are_same_calls(calls_of(message), calls_of(reply), _NO_TOOLS)
    )


def text_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart)).strip()


def reasoning_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, ReasoningPart)).strip()


def calls_of(message: Message) -> list[ToolCallPart]:
    return [part for part in message.parts if isinstance(part, ToolCallPart)]


def _are_same_calls(sent: list[ToolCallPart], written: list[ToolCallPart], tools: Mapping[str, DeclaredValue]) -> bool:
    return len(sent) == len(written) and all(
        _is_same_call(a, b, tools.get(a.name)) for a, b in zip(sent, written, strict=True)
    )


def _is_same_call(sent: ToolCallPart, written: ToolCallPart, declared: DeclaredValue | None) -> bool:
    if sent.name != written.name:
        return False
    if _is_same_value(sent.arguments, written.arguments):
        return True
    is_own = sent.call_id == written.call_id
    return is_own and declared is not None and _is_same_value(sent.arguments, written.arguments, declared)


def _is_same_value(sent: Any, written: Any, declared: DeclaredValue | None = None) -> bool:
    """Return whether both are the same JSON value; 1.0 equals 1, since some languages have only one kind of number.

    With `declared`, objects in `sent` may have additional properties that have the declared default.
    """
    match sent, written:
        case dict(), dict():
            return _is_same_object(sent, written, declared)
        case list(), list():
            items = None if declared is None else declared.items
            return len(sent) == len(written) and all(
                _is_same_value(a, b, items) for a, b in zip(sent, written, strict=True)
            )
        case bool(), _:
            return sent is written
        case _, bool():
            return False
        case int() | float(), int() | float():
            return sent == written
        case _:
            return type(sent) is type(written) and bool(sent == written)


def _is_same_object(sent: dict[str, Any], written: dict[str, Any], declared: DeclaredValue | None) -> bool:
    if len(sent) < len(written) or (declared is None and len(sent) > len(written)):
        return False
    for key, value in sent.items():
        known = None if declared is None else declared.argument(key)
        if key in written:
            if not _is_same_value(value, written[key], known):
                return False
        elif known is None or not any(_is_same_value(value, default) for default in known.defaults()):
            return False
    return all(key in sent for key in written)
