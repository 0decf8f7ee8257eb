"""Which JSON schemas a grammar can be made of. What it could only approximate is refused, by keyword and place."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.errors import InvalidParameter
from .formats import FORMATS, NARROWED

MAX_SCHEMA_DEPTH = 64
MAX_INTEGER = 2**53 - 1  # that every client reads exactly
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
REFUSED_KEYWORDS = (
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
)  # fmt: skip
_OPTIONS = {"whitespace_pattern": "[ ]?"}  # more white space invites a weak model to write nothing else

_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def checked_schema(schema: Any, param: str) -> Any:
    """The schema as a grammar takes it. Raises InvalidParameter, naming the keyword and where it stands.

    A format that no grammar is known for is left out: JSON Schema makes it an annotation.
    """
    return _checked(schema, param, MAX_SCHEMA_DEPTH)


def with_options(schema: Any, **options: Any) -> Any:
    """For a `%json` of a grammar: how the JSON may be spaced and escaped."""
    if schema is True:
        schema = {}
    return {**schema, "x-guidance": {**_OPTIONS, **options}} if isinstance(schema, dict) else schema


def _checked(schema: Any, path: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise InvalidParameter(f"`{path}` must be a JSON schema: an object, true or false.", param=path)
    if depth == 0:
        raise InvalidParameter(f"`{path}` is nested deeper than {MAX_SCHEMA_DEPTH} schemas.", param=path)
    for keyword in REFUSED_KEYWORDS:
        if keyword in schema and not _says_nothing(keyword, schema):
            raise InvalidParameter(
                f"`{path}.{keyword}`: replies cannot be guided by the keyword `{keyword}`. Leave it out.",
                param=f"{path}.{keyword}",
            )
    _check_type(schema.get("type"), path)
    kept = {key: value for key, value in schema.items() if key not in REFUSED_KEYWORDS and key != "x-guidance"}
    _set_format(kept)
    _bound_digits(kept)
    for key, place, child in _children(kept, path):
        _put(kept, key, _checked(child, place, depth - 1))
    return kept


def _set_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if name not in FORMATS:
        schema.pop("format", None)
    elif name in NARROWED:
        del schema["format"]
        pattern = {"pattern": f"^{FORMATS[name]}$"}
        schema |= {"allOf": [*schema.get("allOf", ()), pattern]} if "pattern" in schema else pattern


def _bound_digits(schema: dict[str, Any]) -> None:
    """An integer that nothing bounds has no last digit for a weak model."""
    types = schema.get("type")
    bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    if types == "integer" and not bounds & schema.keys():
        schema |= {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}


def _says_nothing(keyword: str, schema: Mapping[str, Any]) -> bool:
    """`then` without `if`, `uniqueItems: false` and their kin."""
    match keyword:
        case "uniqueItems":
            return schema[keyword] is False
        case "then" | "else":
            return "if" not in schema
        case "if":
            return "then" not in schema and "else" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
    return False


def _check_type(type_: Any, path: str) -> None:
    names = type_ if isinstance(type_, list) else [type_]
    for name in names:
        if type_ is not None and (not isinstance(name, str) or name not in TYPES):
            raise InvalidParameter(f"`{path}.type`: {name!r} is no JSON type.", param=f"{path}.type")


Key = tuple[str, str | int | None]


def _children(schema: Mapping[str, Any], path: str) -> Iterator[tuple[Key, str, Any]]:
    """Where other schemas stand in one: never inside of enum, const, default or examples."""
    for name in _ONE:
        if name in schema and not isinstance(schema[name], list):
            yield (name, None), f"{path}.{name}", schema[name]
    for name in _LISTS:
        children = schema.get(name)
        if isinstance(children, list):
            for number, child in enumerate(children):
                yield (name, number), f"{path}.{name}[{number}]", child
    for name in _MAPS:
        children = schema.get(name)
        if isinstance(children, Mapping):
            for key, child in children.items():
                yield (name, key), f"{path}.{name}.{key}", child


def _put(schema: dict[str, Any], key: Key, child: Any) -> None:
    name, inner = key
    if inner is None:
        schema[name] = child
    elif isinstance(inner, int):
        schema[name] = [*schema[name][:inner], child, *schema[name][inner + 1 :]]
    else:
        schema[name] = {**schema[name], inner: child}
