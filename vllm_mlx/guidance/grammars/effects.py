"""Decides by JSON Schema's own rules which keywords of a schema have no effect: they exclude no value."""

from collections.abc import Mapping
from typing import Any

from ...formats.bodies.tool_schema import SchemaBudget

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_ABOUT: Mapping[str, frozenset[str]] = {  # keywords that judge values of some types alone
    keyword: frozenset(types.split())
    for types, keywords in {
        "string": "minLength maxLength pattern format",
        "integer number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
        "array": "items prefixItems additionalItems contains minItems maxItems uniqueItems unevaluatedItems",
        "object": "properties patternProperties additionalProperties required minProperties maxProperties "
        "propertyNames dependentRequired dependentSchemas dependencies unevaluatedProperties",
    }.items()
    for keyword in keywords.split()
}
_ABOUT_ALL = frozenset({
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
    "$recursiveRef",
})  # fmt: skip
_ANY_TEXT = ("", "^", "$", ".*", "^.*", ".*$")  # patterns that are found in every text


class Effects:
    """Every look at a schema is paid from `budget`; `param` is the request field for its error."""

    def __init__(self, budget: SchemaBudget, param: str):
        self._budget = budget
        self._param = param

    def has_none(self, keyword: str, schema: Mapping[str, Any], types: frozenset[str] | None = None) -> bool:
        """Return whether the keyword excludes no value of `types`, by default of those that the schema allows."""
        value, types = schema[keyword], _types(schema) if types is None else types
        if keyword in _ABOUT and not _ABOUT[keyword] & types:
            return True
        match keyword, value:
            case (("properties" | "patternProperties"), Mapping()):
                return all(self._fits(inner, TYPES) for inner in value.values())
            case "dependentSchemas", Mapping():
                return all(self._fits(inner, frozenset({"object"})) for inner in value.values())
            case (("dependentRequired" | "dependencies"), Mapping()):
                return all(self._asks_nothing(name, needed, schema) for name, needed in value.items())
            case (("additionalProperties" | "additionalItems" | "items"), Mapping() | bool()):
                return self._fits(value, TYPES)
            case "unevaluatedProperties", _:
                return "additionalProperties" in schema or self._fits(value, TYPES)
            case "unevaluatedItems", _:
                return isinstance(schema.get("items"), Mapping | bool) or self._fits(value, TYPES)
            case "propertyNames", _:
                return schema.get("maxProperties") == 0 or self._fits(value, frozenset({"string"}))
            case "contains", _:
                return self._contains_nothing(schema)
            case (("then" | "else"), _):
                return "if" not in schema or self._fits(value, types)
            case "not", _:
                return self._fits_nothing(value, types)
            case (("allOf" | "prefixItems"), list()):
                return all(self._fits(inner, types if keyword == "allOf" else TYPES) for inner in value)
            case "anyOf", list():
                return any(self._fits(inner, types) for inner in value)
            case "oneOf", [inner]:
                return self._fits(inner, types)
            case "type", _:
                return types <= _types(schema)
            case "uniqueItems", _:
                return value is False or schema.get("maxItems") in (0, 1)
            case (("minLength" | "minItems" | "minProperties"), 0):
                return True
            case "required", []:
                return True
            case "pattern", str():
                return value in _ANY_TEXT
        return keyword == "if" or (keyword not in _ABOUT and keyword not in _ABOUT_ALL)

    def _fits(self, schema: Any, types: frozenset[str]) -> bool:
        """Return whether every value of these types follows the schema."""
        self._budget.spend(self._param)
        if not isinstance(schema, Mapping):
            return schema is True
        return all(self.has_none(keyword, schema, types) for keyword in schema)

    def _fits_nothing(self, schema: Any, types: frozenset[str]) -> bool:
        """Return whether no value of these types follows the schema, as far as its type and its `not` say."""
        self._budget.spend(self._param)
        if not isinstance(schema, Mapping):
            return schema is False
        return not types & _types(schema) or ("not" in schema and self._fits(schema["not"], types))

    def _asks_nothing(self, name: str, needed: Any, schema: Mapping[str, Any]) -> bool:
        """Return whether the presence of the property `name` asks for nothing that is not asked for without it."""
        if not isinstance(needed, list):
            return self._fits(needed, TYPES)
        required = schema.get("required")
        return all(other == name or (isinstance(required, list) and other in required) for other in needed)

    def _contains_nothing(self, schema: Mapping[str, Any]) -> bool:
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if "unevaluatedItems" in schema:
            return False  # items that `contains` accepts are evaluated
        if least == 0 and most is None:
            return True
        is_bounded = least in (0, 1) and (least == 0 or schema.get("minItems", 0) not in (0, 0.0))
        return most is None and is_bounded and self._fits(schema["contains"], TYPES)


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of the values that the schema allows, by its `type` alone."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list) or not all(isinstance(name, str) and name in TYPES for name in names):
        return TYPES
    also = ("integer",) if "number" in names else ()
    return frozenset((*names, *also, *(("null",) if schema.get("nullable") is True else ())))
