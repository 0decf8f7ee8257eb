"""Which JSON schemas a grammar can be made of. What it could only approximate is refused, by keyword and place."""

from collections.abc import Mapping
from typing import Any

from ...core.errors import InvalidParameter, shown
from ...formats.schema_budget import SchemaBudget
from .conjunctions import check_conjunctions
from .formats import FORMATS, NARROWED
from .keyword_values import COUNTS, check_values

MAX_SCHEMA_DEPTH = 64
MAX_INTEGER = 2**53 - 1  # that every client reads exactly
REFUSED_KEYWORDS = (
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
)  # fmt: skip
_OPTIONS = {"whitespace_pattern": "[ ]?"}  # more white space invites a weak model to write nothing else

_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def checked_schema(schema: Any, param: str, budget: SchemaBudget | None = None) -> Any:
    """The schema as a grammar takes it. Raises InvalidParameter, naming the keyword and where it stands.

    A format that no grammar is known for is left out: JSON Schema makes it an annotation. `budget` pays for it.
    """
    budget = SchemaBudget() if budget is None else budget
    checked = _checked(schema, param, MAX_SCHEMA_DEPTH, budget)
    check_conjunctions(checked, param, budget)
    return checked


def with_options(schema: Any, **options: Any) -> Any:
    """For a `%json` of a grammar: how the JSON may be spaced and escaped."""
    if schema is True:
        schema = {}
    return {**schema, "x-guidance": {**_OPTIONS, **options}} if isinstance(schema, dict) else schema


def _checked(schema: Any, path: str, depth: int, budget: SchemaBudget) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise InvalidParameter(f"`{path}` must be a JSON schema: an object, true or false.", param=path)
    if depth == 0:
        raise InvalidParameter(f"`{path}` is nested deeper than {MAX_SCHEMA_DEPTH} schemas.", param=path)
    budget.spend(path, 1 + sum(len(value) for value in schema.values() if isinstance(value, list | dict)))
    for keyword in REFUSED_KEYWORDS:
        if keyword in schema and not _says_nothing(keyword, schema):
            raise InvalidParameter(
                f"`{path}.{keyword}`: replies cannot be guided by the keyword `{keyword}`. Leave it out.",
                param=f"{path}.{keyword}",
            )
    kept = {key: value for key, value in schema.items() if key not in REFUSED_KEYWORDS and key != "x-guidance"}
    check_values(kept, path)
    kept |= {keyword: int(kept[keyword]) for keyword in COUNTS if keyword in kept}  # 3.0 is a whole number too
    _set_format(kept)
    _bound_digits(kept)
    return {key: _checked_value(key, value, path, depth - 1, budget) for key, value in kept.items()}


def _checked_value(keyword: str, value: Any, path: str, depth: int, budget: SchemaBudget) -> Any:
    """Where other schemas stand in one: never inside of enum, const, default or examples."""
    path = f"{path}.{shown(keyword)}"
    if keyword in _LISTS and isinstance(value, list):
        return [_checked(each, f"{path}[{number}]", depth, budget) for number, each in enumerate(value)]
    if keyword in _MAPS:
        return {key: _checked(each, f"{path}.{shown(key)}", depth, budget) for key, each in value.items()}
    return _checked(value, path, depth, budget) if keyword in _ONE else value


def _set_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if not isinstance(name, str) or name not in FORMATS:
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
