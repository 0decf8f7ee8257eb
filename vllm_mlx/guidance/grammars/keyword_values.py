"""Which values the keywords of a JSON schema take. Knows one schema, not those inside of it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...core.errors import InvalidParameter, shown

COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def check_values(schema: Mapping[str, Any], path: str) -> None:
    """Raises InvalidParameter, naming the keyword and where it stands, for a value without a meaning in JSON Schema."""
    for keyword, value in schema.items():
        is_meant, wanted = _VALUES.get(keyword, _ANY)
        if not is_meant(value):
            place = f"{path}.{keyword}"
            raise InvalidParameter(f"`{place}` must be {wanted}.", param=place)
    _check_type(schema.get("type", []), f"{path}.type")


def _check_type(types: Any, path: str) -> None:
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in TYPES:
            raise InvalidParameter(f"`{path}`: {shown(repr(name))} is no JSON type.", param=path)


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
_TEXT = _is_text, "a text"
_MAP = _is_map, "an object that holds schemas"
_LIST = _is_full_list, "a list of at least one schema"
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(COUNTS, _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _MAP),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _LIST),
    "prefixItems": (lambda value: isinstance(value, list), "a list of schemas"),
    "required": (_are_texts, "a list of texts"),
    "enum": (_is_full_list, "a list of at least one value"),
}
