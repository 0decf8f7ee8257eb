"""Writes argument values as a family's own literals: quoted strings without escapes."""

import json
from collections.abc import Mapping
from typing import Any

from ...core.errors import InvalidParameter
from .json_schema import MAX_SCHEMA_DEPTH
from .lark import LarkWriter, either
from .shapes import object_shapes, separated
from .values import Values


class Literals:
    """Values of one tool's arguments. Each schema is written once, however many others refer to it."""

    def __init__(self, values: Values, writer: LarkWriter, quote: str):
        self._values = values
        self._writer = writer
        self._quote = quote
        self._written: dict[
            int, tuple[Any, str]
        ] = {}  # by the id of the schema, which is kept so that its id stays its own
        self._open: set[int] = set()  # ids of the schemas that are currently written

    def value(self, schema: Any, path: str) -> str:
        """Return an expression for a value. Raises InvalidParameter for a schema that such literals cannot follow."""
        schema = self._values.resolved(schema, path)
        if id(schema) in self._written:
            return self._written[id(schema)][1]
        if id(schema) in self._open or len(self._open) == MAX_SCHEMA_DEPTH:
            message = f"`{path}` refers to itself, or is nested too deeply, for this model's tool-call format."
            raise InvalidParameter(message, param=path)
        self._open.add(id(schema))
        written = self._expression(schema, path)
        self._open.remove(id(schema))
        self._written[id(schema)] = schema, written
        return written

    def _expression(self, schema: Mapping[str, Any], path: str) -> str:
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                options = [self.value(branch, path) for branch in schema[keyword]]
                return self._writer.rule(either(options))
        if "enum" in schema or "const" in schema:
            fixed = schema["enum"] if "enum" in schema else [schema["const"]]
            return self._writer.rule(either(self._fixed(value, path) for value in fixed))
        types = self._values.types(schema)
        if types is None:
            types = frozenset({"string", "integer", "boolean"})
        return either(self._of_type(name, schema, path) for name in sorted(types))

    def _of_type(self, name: str, schema: Mapping[str, Any], path: str) -> str:
        match name:
            case "string":
                quote = self._quote
                return f"{self._writer.text(quote)} {self._values.string(schema, path, quote, (quote,))}"
            case "array":
                return self._writer.rule(self._array(schema, path))
            case "object":
                return self._writer.rule(self._object(schema, path))
            case _:
                return self._values.json({**{key: schema[key] for key in schema if key != "nullable"}, "type": name})

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        if "prefixItems" in schema:
            raise InvalidParameter(
                f"`{path}.prefixItems` cannot be enforced in this model's tool-call format.", param=path
            )
        low, high = schema.get("minItems") or 0, schema.get("maxItems")
        if high == 0:
            return '"[" "]"'
        item = self._writer.rule(self.value(schema.get("items", {}), f"{path}.items"))
        least, most = max(0, low - 1), "" if high is None else high - 1
        items = f'{item} ("," {item}){{{least},{most}}}'
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _object(self, schema: Mapping[str, Any], path: str) -> str:
        options = []
        for shape in object_shapes(schema, path, self._writer.budget):
            members = []
            for key, inner, is_required in shape.arguments:
                value = self.value(inner, f"{path}.properties.{key}")
                members.append((f"{self._writer.plain(key + ':')} {value}", is_required))
            options.append(separated(members, '","', self._writer))
        return f'"{{" {either(options)} "}}"'

    def _fixed(self, value: Any, path: str) -> str:
        quote = self._writer.text(self._quote)
        match value:
            case str():
                return f"{quote} {self._writer.plain(value)} {quote}"
            case None | bool() | int() | float():
                return self._writer.plain(json.dumps(value))
        raise InvalidParameter(
            f"`{path}` contains a value that cannot be enforced in this model's tool-call format.", param=path
        )
