"""Values of a family's own literals, whose strings stand in quotes that nothing escapes."""

import json
from collections.abc import Mapping
from typing import Any

from ...core.errors import InvalidParameter
from ..bodies.schema import argument_types
from .lark import LarkWriter, either
from .shapes import GuidedTool, object_shapes, separated
from .values import Values


def literal_value(schema: Any, path: str, values: Values, writer: LarkWriter, quote: str, depth: int = 16) -> str:
    """Raises InvalidParameter for what such literals cannot be held to."""
    schema = values.resolved(schema, path)
    if depth == 0:
        raise InvalidParameter(f"`{path}` refers to itself too deeply for this model's format of calls.", param=path)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            options = (literal_value(each, path, values, writer, quote, depth - 1) for each in schema[keyword])
            return either(options)
    if "enum" in schema or "const" in schema:
        fixed = schema["enum"] if "enum" in schema else [schema["const"]]
        return either(_fixed(each, path, writer, quote) for each in fixed)
    types = argument_types({"properties": {"": schema}}, "")
    if types is None:
        types = frozenset({"string", "integer", "boolean"})
    return either(_of_type(name, schema, path, values, writer, quote, depth) for name in sorted(types))


def _of_type(
    name: str, schema: Mapping[str, Any], path: str, values: Values, writer: LarkWriter, quote: str, depth: int
) -> str:
    match name:
        case "string":
            return f"{writer.text(quote)} {values.string(schema, path, quote, (quote,))}"
        case "array":
            return writer.rule(_array(schema, path, values, writer, quote, depth))
        case "object":
            return writer.rule(_object(schema, path, values, writer, quote, depth))
        case _:
            return values.json({**{key: schema[key] for key in schema if key != "nullable"}, "type": name})


def _array(schema: Mapping[str, Any], path: str, values: Values, writer: LarkWriter, quote: str, depth: int) -> str:
    if "prefixItems" in schema:
        raise InvalidParameter(f"`{path}.prefixItems` cannot be kept in this model's format of calls.", param=path)
    low, high = schema.get("minItems") or 0, schema.get("maxItems")
    if high == 0:
        return '"[" "]"'
    item = writer.rule(literal_value(schema.get("items", {}), f"{path}.items", values, writer, quote, depth - 1))
    least, most = max(0, low - 1), "" if high is None else high - 1
    items = f'{item} ("," {item}){{{least},{most}}}'
    return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'


def _object(schema: Mapping[str, Any], path: str, values: Values, writer: LarkWriter, quote: str, depth: int) -> str:
    options = []
    for shape in object_shapes(GuidedTool("", schema, path)):
        members = []
        for key, each, is_required in shape.arguments:
            value = literal_value(each, f"{path}.properties.{key}", values, writer, quote, depth - 1)
            members.append((f"{writer.plain(key + ':')} {value}", is_required))
        options.append(separated(members, '","', writer))
    return f'"{{" {either(options)} "}}"'


def _fixed(value: Any, path: str, writer: LarkWriter, quote: str) -> str:
    match value:
        case str():
            return f"{writer.text(quote)} {writer.plain(value)} {writer.text(quote)}"
        case None | bool() | int() | float():
            return writer.plain(json.dumps(value))
    raise InvalidParameter(f"`{path}` holds a value that cannot be kept in this model's format of calls.", param=path)
