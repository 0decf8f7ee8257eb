"""Whether a message that a client sends back is a reply that was given, as clients re-write replies. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

from ..core.messages import MediaPart, Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart, ToolSpec
from ..formats.bodies.tool_schema import resolve
from ..output.reply import is_flat

_MAX_BRANCHES = 64  # subschemas that are looked at for one value; a default beyond them counts as undeclared
_ALTERNATIVES = ("allOf", "anyOf", "oneOf")


class Declared:
    """The subschemas that may describe one value. Whatever is not of a schema's form declares nothing."""

    def __init__(self, schemas: tuple[Any, ...], root: Mapping[str, Any]):
        self._schemas = schemas
        self._root = root
        self._children: dict[str, Declared | None] = {}
        self._items: Declared | None = None

    def argument(self, name: str) -> "Declared | None":
        """None where no subschema names the property."""
        if name not in self._children:
            properties = (branch.get("properties") for branch in self._branches)
            found = tuple(each[name] for each in properties if isinstance(each, Mapping) and name in each)
            if not found:
                return None
            self._children[name] = Declared(found, self._root)
        return self._children[name]

    @property
    def items(self) -> "Declared":
        if self._items is None:
            self._items = Declared(tuple(branch.get("items") for branch in self._branches), self._root)
        return self._items

    def defaults(self) -> Iterator[Any]:
        """Those that nest no deeper than the arguments of a reply."""
        found = (branch["default"] for branch in self._branches if "default" in branch)
        return (default for default in found if is_flat(default))

    @cached_property
    def _branches(self) -> tuple[Mapping[str, Any], ...]:
        """The subschemas, what they refer to and their alternatives: each once, and no more than `_MAX_BRANCHES`."""
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


def declared_arguments(tools: Iterable[ToolSpec]) -> dict[str, Declared]:
    """What each tool declares of the object of its arguments."""
    return {tool.name: Declared((tool.parameters,), tool.parameters) for tool in tools if tool.parameters is not None}


_NO_TOOLS: Mapping[str, Declared] = {}


def is_echo(message: Message, reply: Message, tools: Mapping[str, Declared] = _NO_TOOLS) -> bool:
    """Whether the message says what the reply said. White space around texts and the order of arguments may differ.

    The reasoning may be missing. A call that is sent back under its own id may have further arguments, where each has
    the default that its tool in `tools` declares: clients fill these in. Anything else that was added is an edit.
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
    """The same reply, its reasoning included, but for white space around texts and the order of arguments."""
    one, other = calls_of(message), calls_of(reply)
    return (
        text_of(message) == text_of(reply)
        and reasoning_of(message) == reasoning_of(reply)
        and len(one) == len(other)
        and all(a.name == b.name and _is_same_value(a.arguments, b.arguments) for a, b in zip(one, other, strict=True))
    )


def text_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart)).strip()


def reasoning_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, ReasoningPart)).strip()


def calls_of(message: Message) -> list[ToolCallPart]:
    return [part for part in message.parts if isinstance(part, ToolCallPart)]


def _are_same_calls(sent: list[ToolCallPart], written: list[ToolCallPart], tools: Mapping[str, Declared]) -> bool:
    return len(sent) == len(written) and all(
        _is_same_call(a, b, tools.get(a.name)) for a, b in zip(sent, written, strict=True)
    )


def _is_same_call(sent: ToolCallPart, written: ToolCallPart, declared: Declared | None) -> bool:
    if sent.name != written.name:
        return False
    if _is_same_value(sent.arguments, written.arguments):
        return True
    is_own = sent.call_id == written.call_id
    return is_own and declared is not None and _is_same_value(sent.arguments, written.arguments, declared)


def _is_same_value(sent: Any, written: Any, declared: Declared | None = None) -> bool:
    """Whether both are the same JSON. A client whose language has one kind of number writes 1.0 as 1.

    With `declared`, objects in `sent` may have further properties that have the declared default.
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


def _is_same_object(sent: dict[str, Any], written: dict[str, Any], declared: Declared | None) -> bool:
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
