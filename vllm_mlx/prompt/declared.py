"""The defaults that tools declare for arguments, at any depth of a JSON schema. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

from ..core.messages import ToolSpec
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
