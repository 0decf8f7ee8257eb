"""Writes argument values without JSON's quotes, or as literals in a family's own quotes."""

import json
from collections.abc import Container, Iterable, Mapping
from typing import Any

from ...core.errors import InvalidParameter
from ...formats.bodies.tool_schema import STRING, SchemaTypes, Types
from .json_schema import FORMATS, MAX_SCHEMA_DEPTH, refused
from .lark import LarkWriter, either, in_slashes
from .shapes import object_shapes, separated

ANY_TEXT = r"/(?s:.*)/"
# Text that the parser reads as a string although the schema also allows other types. It begins with any text, because
# a complement alone matches any bytes, those of special tokens among them.
_NO_TEXT = rf"{ANY_TEXT} & ~/\s*([-+.0-9][-+.0-9eE]*|true|false|null|True|False)?\s*/ & ~/\s*[{{\[](?s:.*)/"
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})


class Values:
    """Values of one tool's arguments. `param`: the request field that contains its schema."""

    def __init__(self, writer: LarkWriter, parameters: Mapping[str, Any], param: str):
        self._writer = writer
        self._root = parameters
        self._types = SchemaTypes(parameters, writer.budget, param)
        self._unions: dict[tuple[int, str, bool], list[tuple[bool, str]]] = {}  # by the id of the schema
        self._open: set[int] = set()  # ids of the unions that are currently written

    def value(
        self, schema: Any, path: str, end: str, *, without: Iterable[str], tells_type: bool = False
    ) -> list[tuple[bool, str]]:
        """Return (whether it is text, expression) for each way to write a value with its `end`.

        `without`: tags that text must not contain; `tells_type`: a tag says whether the value is text.
        """
        schema = self.resolved(schema, path)
        types = self.types(schema)
        if types is None and schema.keys() <= _ANNOTATIONS:
            return [(True, self._writer.value(ANY_TEXT, end, without=without))]
        if types is None:
            raise refused(path, " needs a `type` in this model's tool-call format.")
        if "string" not in types:
            return [(False, f"{self.json(schema)} {self._writer.text(end)}")]
        if types == STRING:
            return [(True, self.string(schema, path, end, without))]
        key = id(schema), end, tells_type
        if key not in self._unions:
            self._unions[key] = self._union(schema, path, end, without, tells_type)
        return self._unions[key]

    def types(self, schema: Any) -> Types:
        return self._types.of(schema)

    def json(self, schema: Any, **options: Any) -> str:
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return self._writer.json({**shared, **schema} if isinstance(schema, dict) else schema, **options)

    def _union(
        self, schema: Mapping[str, Any], path: str, end: str, without: Iterable[str], tells_type: bool
    ) -> list[tuple[bool, str]]:
        if id(schema) in self._open:
            raise refused(path, " refers to itself: it is one of its own alternatives.")
        self._open.add(id(schema))
        branches: list[tuple[bool, str]] = []
        for branch in _branches(schema):
            branch = self.resolved(branch, path)
            if self.types(branch) == STRING:
                barred = "" if tells_type else _NO_TEXT
                branches.append((True, self.string(branch, path, end, without, barred)))
            else:
                branches += self.value(branch, path, end, without=without, tells_type=tells_type)
        self._open.remove(id(schema))
        return list(dict.fromkeys(branches))

    def string(self, schema: Mapping[str, Any], path: str, end: str, without: Iterable[str], barred: str = "") -> str:
        """Return an expression for a string that follows the schema, then `end`. `barred`: a further condition."""
        fixed = _texts(schema)
        if fixed is not None:
            return f"{either(self._writer.plain(text) for text in fixed)} {self._writer.text(end)}"
        parts = [part for part in (*_string_parts(schema), barred) if part]
        return self._writer.value(" & ".join(parts) or ANY_TEXT, end, without=without)

    def resolved(self, schema: Any, path: str) -> Mapping[str, Any]:
        schema = self._types.resolved(schema)
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise refused(path, " is not a JSON schema that an argument can follow.")
        return schema


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            return list(schema[keyword])
    if "enum" in schema:
        texts = [value for value in schema["enum"] if isinstance(value, str)]
        others = [value for value in schema["enum"] if not isinstance(value, str)]
        return [{"type": "string", "enum": texts}, {"enum": others}]
    types = [schema["type"]] if isinstance(schema.get("type"), str) else list(schema.get("type") or ())
    if schema.get("nullable") is True and "null" not in types:
        types.append("null")
    return [{**{k: v for k, v in schema.items() if k != "nullable"}, "type": name} for name in types]


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    if isinstance(schema.get("const"), str):
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return [value for value in schema["enum"] if isinstance(value, str)]
    return None


def _string_parts(schema: Mapping[str, Any]) -> Iterable[str]:
    low, high = schema.get("minLength") or 0, schema.get("maxLength")
    if low or high is not None:
        yield f"/(?s:.{{{low},{'' if high is None else high}}})/"
    if isinstance(schema.get("pattern"), str):
        yield f"/{_unanchored(schema['pattern'])}/"
    if schema.get("format") in FORMATS:
        yield f"/{FORMATS[schema['format']]}/"


def _unanchored(pattern: str) -> str:
    """Let a pattern match anywhere in the text, as in JSON Schema; each of its branches may be anchored by itself."""
    return "|".join(f"({_anywhere(branch)})" for branch in _branches_of(in_slashes(pattern)))


def _anywhere(branch: str) -> str:
    is_anchored = branch.startswith("^")
    is_ended = branch.endswith("$") and not branch.endswith(r"\$")
    inner = branch[is_anchored : len(branch) - is_ended]
    return f"{'' if is_anchored else '(?s:.*)'}({inner}){'' if is_ended else '(?s:.*)'}"


def _branches_of(pattern: str) -> list[str]:
    """Split a pattern at the bars outside of groups and character classes."""
    branches, depth, start, at, in_class = [], 0, 0, 0, False
    first = 0  # where the characters of the last class begin: a `]` there is one of them
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]" or at == first
        elif char == "[":
            in_class = True
            first = at + 1 + pattern.startswith("^", at + 1)
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            branches.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*branches, pattern[start:]]


class Literals:
    """Values of one tool's arguments. Each schema is written once, however many others refer to it."""

    def __init__(self, values: Values, writer: LarkWriter, quote: str, keys: Container[str]):
        """`keys`: the names of arguments that the dialect can write."""
        self._values = values
        self._writer = writer
        self._quote = quote
        self._keys = keys
        self._written: dict[int, tuple[Any, str]] = {}  # by the id of the schema, which is kept: its id stays its own
        self._open: set[int] = set()  # ids of the schemas that are currently written

    def value(self, schema: Any, path: str) -> str:
        """Return an expression for a value. Raises InvalidParameter for a schema that such literals cannot follow."""
        schema = self._values.resolved(schema, path)
        if id(schema) in self._written:
            return self._written[id(schema)][1]
        if id(schema) in self._open or len(self._open) == MAX_SCHEMA_DEPTH:
            raise refused(path, " refers to itself, or is nested too deeply, for this model's tool-call format.")
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
        for shape in object_shapes(schema, path, self._writer.budget, self._keys):
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
        raise refused(path, " contains a value that cannot be enforced in this model's tool-call format.")
