"""Closes the objects in a tool's arguments: a reply cannot write a name that no schema of the object declares."""

from collections.abc import Mapping
from typing import Any

from ...formats.bodies.tool_schema import SchemaBudget, resolve, schemas_in
from .json_schema import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMA_VALUES

Names = frozenset[object]
_NONE: Names = frozenset()
_ANY = object()  # stands for the undeclared names that a schema allows
_CHOICES = ("anyOf", "oneOf")
_JOINS = (*_CHOICES, "allOf", "$ref")


def closed(schema: Mapping[str, Any], param: str, budget: SchemaBudget) -> Any:
    """Return the schema in which an absent `additionalProperties` means false wherever `properties` are declared.

    Schemas that one object follows together, as `allOf`, or `anyOf` beside `properties`, allow each other's names.
    """
    return _Closing(schema, param, budget).closed(schema)


class _Closing:
    def __init__(self, root: Mapping[str, Any], param: str, budget: SchemaBudget):
        self._root = root
        self._param = param
        self._budget = budget
        self._known: dict[int, Names] = {}  # by the id of the schema

    def closed(self, schema: Any, beside: Names = _NONE) -> Any:
        """Close a schema and those inside it. `beside`: the names that other schemas of the same object declare."""
        schema = {} if schema is True and beside else schema
        if not isinstance(schema, Mapping):
            return schema
        self._budget.spend(self._param, len(beside))  # each schema was paid for when it was checked
        own, joined = _own_names(schema), {keyword: self._joined_names(schema, keyword) for keyword in _JOINS}
        elsewhere = beside.union(*joined.values())
        inner = {key: self._inside(key, value, elsewhere) for key, value in schema.items()}
        for keyword in filter(joined.get, _JOINS):
            others = beside.union(own, *(names for other, names in joined.items() if other != keyword))
            if keyword == "$ref" and not others:
                return inner  # the schema that it refers to is closed in its own place
            parts = schemas_in(schema, keyword)
            if (len(parts) == 1 and not others) or (keyword in _CHOICES and not joined[keyword] <= others):
                rest = self._open({key: value for key, value in inner.items() if key != keyword})
                return {**rest, keyword: [self.closed(part, others) for part in parts]}
        if "properties" not in schema and not elsewhere:
            return inner
        inner = self._open(inner)
        if "additionalProperties" in schema or _ANY in elsewhere or (_ANY in own and any(joined.values())):
            return inner
        properties = inner.get("properties", {})
        free = sorted(str(name) for name in (own | elsewhere) - {_ANY, *properties})
        return {**inner, "properties": {**properties, **dict.fromkeys(free, True)}, "additionalProperties": False}

    def _inside(self, keyword: str, value: Any, elsewhere: Names) -> Any:
        """Close the schemas inside a keyword's value, except schemas that may be joined with others elsewhere."""
        if keyword in SCHEMA_MAPS:
            return {name: inner if name in elsewhere else self.closed(inner) for name, inner in value.items()}
        if keyword in SCHEMA_LISTS and isinstance(value, list):
            return [part if self._names(part) and keyword in _JOINS else self.closed(part) for part in value]
        return self.closed(value) if keyword in SCHEMA_VALUES else value

    def _open(self, schema: Any) -> Any:
        """Write the schemas that `$ref` refers to in its place: where they stand, they are closed."""
        if not isinstance(schema, Mapping):
            return schema
        self._budget.spend(self._param, 1 + len(schema))
        opened = {**schema, **{key: list(map(self._open, schemas_in(schema, key))) for key in _JOINS if key in schema}}
        if "$ref" in schema:
            del opened["$ref"]
            opened["allOf"] = [*opened.get("allOf", ()), self._open(resolve(schema["$ref"], self._root))]
        return opened

    def _names(self, schema: Any) -> Names:
        """The names of its own object that a schema declares."""
        if not isinstance(schema, Mapping):
            return _NONE
        if id(schema) not in self._known:
            self._known[id(schema)] = _NONE
            joined = (self._joined_names(schema, keyword) for keyword in _JOINS)
            self._known[id(schema)] = _own_names(schema).union(*joined)
        return self._known[id(schema)]

    def _joined_names(self, schema: Mapping[str, Any], keyword: str) -> Names:
        if keyword == "$ref":
            return self._names(resolve(schema[keyword], self._root)) if keyword in schema else _NONE
        return _NONE.union(*map(self._names, schemas_in(schema, keyword)))


def _own_names(schema: Mapping[str, Any]) -> Names:
    properties = schema.get("properties")
    names = _NONE if properties is None else frozenset((*properties, *schema.get("required", ())))
    is_open = "patternProperties" in schema or schema.get("additionalProperties", False) is not False
    return names | {_ANY} if is_open else names
