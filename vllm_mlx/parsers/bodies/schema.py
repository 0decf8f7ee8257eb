"""Which JSON types a tool's schema allows for an argument, and the JSON value that a written text stands for."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .json_scanner import json_value

Types = frozenset[str] | None  # None: the schema does not say
STRING: Types = frozenset({"string"})

_MAX_REFS = 16
_MAX_SCALAR = 64  # characters; a longer number or margin is text
_INTEGER_VALUED = re.compile(r"(-?\d+)(?:\.0+)?\Z", re.ASCII)
_MAYBE_SCALAR = re.compile(
    r"(?:[-+.\deE]*|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?|T(?:r(?:ue?)?)?|F(?:a(?:l(?:se?)?)?)?)\Z",
    re.ASCII,
)


def argument_types(parameters: Mapping[str, Any], name: str) -> Types:
    """The types of the argument `name` by the JSON schema of a tool's parameters."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = parameters.get("additionalProperties")
    return _types(schema, parameters, _MAX_REFS)


def child_schema(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema of a property, or of the items of a list; empty where it does not say."""
    properties = schema.get("properties")
    child = properties.get(name) if isinstance(properties, Mapping) else None
    child = schema.get("items") if child is None and name == "item" else child
    return child if isinstance(child, Mapping) else {}


def _types(schema: Any, root: Mapping[str, Any], refs_left: int) -> Types:
    if not isinstance(schema, Mapping) or refs_left == 0:
        return None
    match schema:
        case {"$ref": str(reference)}:
            return _types(resolve(reference, root), root, refs_left - 1)
        case {"type": str(name)}:
            types = frozenset({name})
        case {"type": [*names]}:
            types = frozenset(name for name in names if isinstance(name, str))
        case {"const": value}:
            types = frozenset({_type_of(value)})
        case {"enum": [_, *_] as values}:
            types = frozenset(map(_type_of, values))
        case {"anyOf": [_, *_] as branches} | {"oneOf": [_, *_] as branches}:
            return _union(_types(branch, root, refs_left - 1) for branch in branches)
        case {"allOf": [_, *_] as branches}:
            known = [kinds for branch in branches if (kinds := _types(branch, root, refs_left - 1)) is not None]
            return frozenset.intersection(*known) if known else None
        case {"properties": _}:
            types = frozenset({"object"})
        case {"items": _}:
            types = frozenset({"array"})
        case _:
            return None
    return types | {"null"} if schema.get("nullable") is True else types


def _union(branches: Iterable[Types]) -> Types:
    union: frozenset[str] = frozenset()
    for types in branches:
        if types is None:
            return None
        union |= types
    return union


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    if not reference.startswith("#"):
        return None
    node: Any = root
    for key in reference[1:].split("/")[1:]:
        node = node.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def may_be_value(text: str, types: Types) -> bool:
    """Whether a text that begins like this can still stand for something else than itself."""
    if types == STRING:
        return False
    start = text[: _MAX_SCALAR + 1].lstrip()
    if not start:
        return len(text) <= _MAX_SCALAR
    if start[0] in "{[":
        return True
    rest = text.strip()
    return len(rest) <= _MAX_SCALAR and _MAYBE_SCALAR.match(rest) is not None


def decode(text: str, types: Types) -> str | None:
    """The JSON value that `text` stands for, or None where it is a string.

    A value of a type that the schema does not allow is kept where the schema allows no string either; null is not.
    """
    if not may_be_value(text, types):
        return None
    text = text.strip()
    if types is not None and "boolean" in types and text in ("True", "False"):
        return text.lower()
    value = json_value(text)
    if value is None:
        return None
    kind = _kind(value)
    if types is None:
        return None if kind == "string" else value
    if kind == "number" and types & {"number", "integer"}:
        whole = _INTEGER_VALUED.match(value)
        return whole.group(1) if whole else value if "number" in types or "string" not in types else None
    return value if kind in types or not ({"string"} & types or kind in ("null", "string")) else None


def _kind(value: str) -> str:
    match value[0]:
        case "{":
            return "object"
        case "[":
            return "array"
        case '"':
            return "string"
        case "t" | "f":
            return "boolean"
        case "n":
            return "null"
    return "number"
