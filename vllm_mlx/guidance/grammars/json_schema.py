"""Checks that a grammar can enforce a JSON schema exactly, and closes objects in the arguments of tools.

Other schemas are refused, by keyword and place.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from ...core.errors import InvalidParameter, shown
from ...formats.bodies.tool_schema import SchemaBudget, resolve, schemas_in
from .effects import TYPES, Effects

SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_VALUES = ("additionalProperties", "additionalItems", "items")
MAX_SCHEMA_DEPTH = 64
_READ_DEPTH = 56  # the grammar library reads 128 levels of JSON, two for each schema
MAX_INTEGER = 2**53 - 1  # the largest integer that every client reads exactly
REFUSED_KEYWORDS = (
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
)  # fmt: skip
Held = Literal[
    "all", "known", "plain"
]  # the part of a schema: all or an error, all that can be held, or simple keywords
_PLAIN_KEYWORDS = frozenset({
    "type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "additionalProperties", "$ref",
    "$defs", "definitions", "nullable",
})  # fmt: skip
_PLAIN_PATTERN = re.compile(r"([^\\(]|\\[^bBAzZGkK1-9]|\((?!\?)|\(\?:)*", re.DOTALL)  # without look-around and the like
_DECLARING = frozenset({"properties", "patternProperties", "additionalProperties"})
_MAY_DECLARE = frozenset({
    "$ref", "allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef",
    "$recursiveRef",
})  # fmt: skip
_OPTIONS = {"whitespace_pattern": "[ ]?"}  # with more white space allowed, a weak model may write nothing else


COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

# Patterns of the string formats: each matches valid texts only, though not all of them.
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_MONTHS = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"([0-9]{{4}}-{_MONTHS}|{_LEAP_YEAR}-02-29)"
_HOUR = r"([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+\-]{_HOUR}:[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9]{1,32}(-[a-zA-Z0-9]{1,32}){0,4}"
_HEX = "[0-9a-fA-F]"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,3}D(T[0-9]{1,2}H)?|T[0-9]{1,4}[HMS])",
    "email": rf"[a-zA-Z0-9_+]{{1,32}}(\.[a-zA-Z0-9_+]{{1,32}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": rf"https?:\/\/{_LABEL}(\.{_LABEL}){{0,4}}(:[0-9]{{1,5}})?(\/[a-zA-Z0-9._~\-]{{1,64}}){{0,16}}\/?",
}
NARROWED = frozenset({"date", "time", "date-time"})  # llguidance accepts some invalid values of these


def checked_schema(schema: Any, param: str, budget: SchemaBudget | None = None, *, held: Held = "all") -> Any:
    """Return the schema as the grammar library takes it.

    Raises InvalidParameter, naming the keyword and its place, for a keyword that cannot be held. Unless `held` is
    "all", the keyword is left out instead, so that the schema allows more. A `format` without a known grammar is
    always left out: in JSON Schema it is an annotation. The work is paid from `budget`.
    """
    depth = MAX_SCHEMA_DEPTH if held == "all" else _READ_DEPTH
    return _Checker(schema, SchemaBudget() if budget is None else budget, held).checked(schema, param, depth)


def refused(place: str, why: str) -> InvalidParameter:
    """Make the error about the value at a place of the request. `why`: the sentence, after the place that begins it."""
    return InvalidParameter(f"`{place}`{why}", param=place)


def with_options(schema: Any, **options: Any) -> Any:
    """Add options for a `%json` of a grammar: how the JSON may be spaced and escaped."""
    if schema is True:
        schema = {}
    return {**schema, "x-guidance": {**_OPTIONS, **options}} if isinstance(schema, dict) else schema


class _Checker:
    """Checks the schemas of one root."""

    def __init__(self, root: Any, budget: SchemaBudget, held: Held):
        self._root = root if isinstance(root, Mapping) else {}
        self._budget = budget
        self._held = held

    def checked(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping) or depth == 0:
            deep = f" is nested deeper than {MAX_SCHEMA_DEPTH} schemas."
            why = deep if isinstance(schema, Mapping) else " must be a JSON schema: an object, true or false."
            return self._left_out(refused(path, why))
        self._budget.spend(path, 1 + sum(len(value) for value in schema.values() if isinstance(value, list | dict)))
        effects, kept, lost = Effects(self._budget, path), dict[str, Any](), set[str]()
        for keyword, value in schema.items():
            try:
                if keyword in REFUSED_KEYWORDS and effects.has_none(keyword, schema):
                    continue
                if self._is_held(keyword, value, path):
                    kept[keyword] = self._inside(keyword, value, path, depth - 1)
                elif keyword != "x-guidance":
                    lost.add(keyword)
            except InvalidParameter as error:
                lost.add(keyword)
                self._left_out(error)
        _set_format(kept)
        _bound_digits(kept)
        return kept if self._held == "all" else _opened(kept, lost)

    def _left_out(self, error: InvalidParameter) -> bool:
        """Return the schema that allows every value, to replace one that cannot be held."""
        if self._held == "all":
            raise error
        return True

    def _is_held(self, keyword: str, value: Any, path: str) -> bool:
        """Return whether a grammar may hold the keyword. Raises InvalidParameter if none can."""
        if keyword in REFUSED_KEYWORDS:
            why = f": replies cannot be guided by the keyword `{keyword}`. Leave it out."
            raise refused(f"{path}.{keyword}", why)
        check_value(keyword, value, path)
        if self._held == "all":
            return keyword != "x-guidance"
        match keyword:
            case "x-guidance":
                return False
            case "pattern":
                return self._held == "known" and _PLAIN_PATTERN.fullmatch(value) is not None
            case "patternProperties":
                return self._held == "known" and all(map(_PLAIN_PATTERN.fullmatch, value))
            case "$ref":
                return value[:2] in ("#", "#/") and isinstance(resolve(value, self._root), Mapping | bool)
            case "$schema":
                return "json-schema.org" in str(value)
        return self._held == "known" or keyword in _PLAIN_KEYWORDS

    def _inside(self, keyword: str, value: Any, path: str, depth: int) -> Any:
        """Check the schemas inside a keyword's value. Values of enum, const, default and examples are not schemas."""
        path = f"{path}.{shown(keyword)}"
        if keyword in COUNTS:
            return int(value)  # a count may be written 3.0
        if keyword in SCHEMA_LISTS and isinstance(value, list):
            return [self.checked(inner, f"{path}[{number}]", depth) for number, inner in enumerate(value)]
        if keyword in SCHEMA_MAPS:
            return {key: self.checked(inner, f"{path}.{shown(key)}", depth) for key, inner in value.items()}
        return self.checked(value, path, depth) if keyword in SCHEMA_VALUES else value


def _opened(kept: dict[str, Any], lost: set[str]) -> dict[str, Any]:
    """Allow the values that a keyword that was left out may have allowed, and let branches of `oneOf` overlap."""
    if lost & _DECLARING:
        kept["additionalProperties"] = True
    elif "properties" in kept and lost & _MAY_DECLARE:
        kept.setdefault("additionalProperties", True)
    if "prefixItems" in lost:
        kept.pop("items", None)
    if (branches := kept.pop("oneOf", None)) is not None:
        kept |= {"allOf": [*kept.get("allOf", ()), {"anyOf": branches}]} if "anyOf" in kept else {"anyOf": branches}
    return kept


def _set_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        schema.pop("format", None)
    elif name in NARROWED:
        del schema["format"]
        pattern = {"pattern": f"^{FORMATS[name]}$"}
        schema |= {"allOf": [*schema.get("allOf", ()), pattern]} if "pattern" in schema else pattern


def _bound_digits(schema: dict[str, Any]) -> None:
    """Bound an integer that has no bounds: a weak model may never end it."""
    types = schema.get("type")
    bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    if types == "integer" and not bounds & schema.keys():
        schema |= {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}


def check_value(keyword: str, value: Any, path: str) -> None:
    """Raise InvalidParameter, naming the keyword and its place, for a value without a meaning in JSON Schema."""
    is_meant, wanted = _VALUES.get(keyword, _ANY)
    if not is_meant(value):
        raise refused(f"{path}.{keyword}", f" must be {wanted}.")
    for name in (value if isinstance(value, list) else [value]) if keyword == "type" else ():
        if not isinstance(name, str) or name not in TYPES:
            raise refused(f"{path}.type", f": {shown(repr(name))} is not a JSON type.")


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or math.isfinite(value))


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_ANY = (lambda value: True), ""
_COUNT = _is_count, "a whole number, 0 or greater"
_NUMBER = _is_number, "a number"
_TEXT = _is_text, "a string"
_MAP = _is_map, "an object that holds schemas"
_LIST = _is_full_list, "a list of at least one schema"
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(COUNTS, _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _MAP),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _LIST),
    "prefixItems": (lambda value: isinstance(value, list), "a list of schemas"),
    "required": (_are_texts, "a list of strings"),
    "enum": (_is_full_list, "a list of at least one value"),
}


# Closed objects: a reply cannot write a name that their schema does not declare

Schema = Mapping[str, Any]
_LISTS = ("allOf", "anyOf", "oneOf")
_NAMING = frozenset({"properties", "patternProperties", "additionalProperties"})


def closed(schema: Schema, param: str, budget: SchemaBudget) -> Any:
    """Return the schema in which an absent `additionalProperties` means false wherever `properties` are declared.

    Schemas with `properties` that one object must follow together, as the parts of `allOf`, are not closed, and neither
    is anything inside them: each would refuse the names of the others.
    """
    return _Closing(schema, param, budget).closed(schema)


class _Closing:
    def __init__(self, root: Schema, param: str, budget: SchemaBudget):
        self._root = root
        self._param = param
        self._budget = budget
        self._kept: set[int] = set()  # ids of the schemas that stay as they are
        for schema in _every_schema(root):
            num_joined = _num_factors(schema) + bool(schema.keys() & {*_NAMING, "required"})
            if num_joined > 1 and any(
                part.keys() & _NAMING for part in self._reached(self._parts(schema), self._parts)
            ):
                self._reached([schema], self._inside, self._kept)

    def closed(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        inner = {keyword: self._closed_value(keyword, value) for keyword, value in schema.items()}
        if id(schema) in self._kept or "properties" not in schema or "additionalProperties" in schema:
            return inner
        properties = inner["properties"]
        if "patternProperties" not in schema:
            together = self._reached([schema], self._parts)
            required = {name for part in together for name in schemas_in(part, "required") if isinstance(name, str)}
            properties |= dict.fromkeys(sorted(required - properties.keys()), True)
        return {**inner, "additionalProperties": False}

    def _closed_value(self, keyword: str, value: Any) -> Any:
        if keyword in SCHEMA_MAPS:
            return {name: self.closed(inner) for name, inner in value.items()}
        if keyword in SCHEMA_LISTS and isinstance(value, list):
            return [self.closed(inner) for inner in value]
        return self.closed(value) if keyword in SCHEMA_VALUES else value

    def _reached(
        self, schemas: Iterable[Any], step: Callable[[Schema], Iterable[Any]], seen: set[int] | None = None
    ) -> list[Schema]:
        """Return the schemas and all that `step` reaches from them. `seen`: ids to skip; new ones are added."""
        waiting, reached = [*schemas], list[Schema]()
        seen = set() if seen is None else seen
        while waiting:
            schema = waiting.pop()
            self._budget.spend(self._param)
            if isinstance(schema, Mapping) and id(schema) not in seen:
                seen.add(id(schema))
                reached.append(schema)
                waiting += step(schema)
        return reached

    def _parts(self, schema: Schema) -> list[Any]:
        """Return the schemas that an object of this schema must follow as well."""
        parts = [part for keyword in _LISTS for part in schemas_in(schema, keyword)]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            self._budget.spend(self._param, reference.count("/"))
            parts.append(resolve(reference, self._root))
        return parts

    def _inside(self, schema: Schema) -> list[Any]:
        return [*self._parts(schema), *_schemas_inside(schema, ("properties", "patternProperties"), SCHEMA_LISTS)]


def _every_schema(root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield `root` and each schema object inside it once."""
    waiting, seen = [root], set[int]()
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, Mapping) and id(schema) not in seen:
            seen.add(id(schema))
            yield schema
            waiting += _schemas_inside(schema, SCHEMA_MAPS, SCHEMA_LISTS)


def _num_factors(schema: Mapping[str, Any]) -> int:
    """Return the number of choices, references and parts of `allOf` that the schema joins."""
    return sum(keyword in schema for keyword in ("anyOf", "oneOf", "$ref")) + len(schemas_in(schema, "allOf"))


def _schemas_inside(schema: Mapping[str, Any], maps: Iterable[str], lists: Iterable[str]) -> Iterable[Any]:
    for keyword in maps:
        if isinstance(schema.get(keyword), Mapping):
            yield from schema[keyword].values()
    for keyword in lists:
        yield from schemas_in(schema, keyword)
    for keyword in SCHEMA_VALUES:
        yield schema.get(keyword)
