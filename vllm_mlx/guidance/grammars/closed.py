"""Closes the objects in a tool's arguments: a reply cannot write a name that their schema does not declare."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ...formats.bodies.tool_schema import SchemaBudget, resolve, schemas_in
from .json_schema import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMA_VALUES

Schema = Mapping[str, Any]
_LISTS = ("allOf", "anyOf", "oneOf")
_NAMING = frozenset({"properties", "patternProperties", "additionalProperties"})


def closed(schema: Schema, param: str, budget: SchemaBudget) -> Any:
    """Return the schema in which an absent `additionalProperties` means false wherever `properties` are declared.

    Schemas with `properties` that one object follows together, as the parts of `allOf`, stay as they are, and so does
    everything inside them: each would refuse the names of the others.
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
        """The schemas themselves and all that steps lead to from them, without the ids in `seen`, which gets theirs."""
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
        """The schemas that an object of this schema follows, too."""
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
    """How many choices, references and parts of `allOf` the schema joins."""
    return sum(keyword in schema for keyword in ("anyOf", "oneOf", "$ref")) + len(schemas_in(schema, "allOf"))


def _schemas_inside(schema: Mapping[str, Any], maps: Iterable[str], lists: Iterable[str]) -> Iterable[Any]:
    for keyword in maps:
        if isinstance(schema.get(keyword), Mapping):
            yield from schema[keyword].values()
    for keyword in lists:
        yield from schemas_in(schema, keyword)
    for keyword in SCHEMA_VALUES:
        yield schema.get(keyword)
