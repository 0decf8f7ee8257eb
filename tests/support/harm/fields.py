"""Every field of a request body, at any depth, found in the server's OpenAPI document. Knows no field by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

Schema = dict[str, Any]
MAX_DEPTH = 12  # of the fields in fields of types that contain themselves
_EXAMPLES: dict[str, Any] = {"integer": 1, "number": 1, "boolean": False, "null": None, "array": [], "object": {}}


@dataclass(frozen=True, slots=True)
class Field:
    """`plant(value)` is a body that is valid but for the value, which stands in this field."""

    name: str
    schema: Schema
    plant: Callable[[Any], Any]


class Document:
    """An OpenAPI document: the fields of its request bodies, and valid values for them."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._paths = document["paths"]
        self._schemas: dict[str, Schema] = document["components"]["schemas"]

    def fields(self, path: str, base: dict[str, Any]) -> list[Field]:
        """Of the body of `POST path`. What a body must have beside the field it has from `base`."""
        body = self._paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]

        def plant(value: Any, own: dict[str, Any]) -> Any:
            return {**own, **value} if isinstance(value, dict) else value

        found = [Field("(body)", body, lambda value: value)]
        for form in _options(self._resolved(body)) or [body]:
            own = base if base.keys() >= set(self._resolved(form).get("required", ())) else {}
            found += self._inside(form, "", partial(plant, own=own), ())
        return found

    def example(self, schema: Schema, depth: int = 0) -> Any:
        """A small valid value."""
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        if "examples" in schema:
            return schema["examples"][0]
        if options := _options(schema):
            return self.example(options[0], depth + 1)
        if schema.get("type") == "object" and depth < MAX_DEPTH:
            required = schema.get("required", ())
            return {name: self.example(schema["properties"][name], depth + 1) for name in required}
        if schema.get("type") == "array" and schema.get("minItems") and depth < MAX_DEPTH:
            return [self.example(schema["items"], depth + 1)]
        return _EXAMPLES.get(schema.get("type", ""), "x")

    def item(self, schema: Schema) -> Any:
        """A small valid element of an array, or None where the schema has no arrays."""
        resolved = self._resolved(schema)
        for option in (resolved, *_options(resolved)):
            option = self._resolved(option)
            if option.get("type") == "array" and "items" in option:
                return self.example(option["items"])
        return None

    def takes(self, schema: Schema, kind: str) -> bool:
        resolved = self._resolved(schema)
        return resolved.get("type") == kind or any(self.takes(option, kind) for option in _options(resolved))

    def _inside(
        self, schema: Schema, name: str, plant: Callable[[Any], Any], above: tuple[str, ...]
    ) -> Iterator[Field]:
        reference = schema.get("$ref", "")
        if reference in above or len(above) > MAX_DEPTH:
            return
        above = (*above, reference) if reference else above
        schema = self._resolved(schema)
        for option in _options(schema):
            yield from self._inside(option, name, plant, above)
        if schema.get("type") == "array" and "items" in schema:
            yield from self._with(schema["items"], f"{name}[]", lambda value: plant([value]), above)
        if schema.get("type") != "object":
            return
        example = self.example(schema)
        for key, inner in schema.get("properties", {}).items():
            yield from self._with(inner, f"{name}.{key}".lstrip("."), _keyed(plant, example, key), above)
        if isinstance(extra := schema.get("additionalProperties"), dict):
            yield from self._with(extra, f"{name}.x".lstrip("."), _keyed(plant, example, "x"), above)

    def _with(self, schema: Schema, name: str, plant: Callable[[Any], Any], above: tuple[str, ...]) -> Iterator[Field]:
        yield Field(name, schema, plant)
        yield from self._inside(schema, name, plant, above)

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


def _options(schema: Schema) -> list[Schema]:
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


def _keyed(plant: Callable[[Any], Any], example: Any, key: str) -> Callable[[Any], Any]:
    return lambda value: plant({**example, key: value})
