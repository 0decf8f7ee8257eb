"""A keyword that excludes no value is no reason to refuse a schema: jsonschema says what excludes one."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.support.drawing import examples
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.formats import SchemaBudget
from vllm_mlx.guidance.grammars.effects import Effects
from vllm_mlx.guidance.grammars.json_schema import REFUSED_KEYWORDS, checked_schema

TEXT: Any = {"type": "string"}
NOTHING_SAID: list[Any] = [
    {"propertyNames": TEXT},  # zod writes it for every record
    {"propertyNames": {}},
    {"propertyNames": {"type": ["string", "null"], "minLength": 0, "maximum": 3, "description": "a name"}},
    {"propertyNames": {"anyOf": [{"type": "integer"}, TEXT]}},
    {"propertyNames": {"allOf": [TEXT, True]}},
    {"propertyNames": {"type": "string", "pattern": ".*"}},
    {"propertyNames": {"not": {"type": "integer"}}},
    {"propertyNames": {"enum": ["a"]}, "type": "array"},
    {"propertyNames": False, "maxProperties": 0},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": [], "b": ["b", "c"]}, "required": ["c"]},
    {"dependentSchemas": {"a": {"type": "object"}, "b": True}},
    {"dependencies": {"a": [], "b": {}}},
    {"contains": True, "minContains": 0},
    {"contains": {"const": 1}, "minContains": 0},
    {"contains": {}, "minItems": 1},
    {"contains": {"const": 1}, "type": "string"},
    {"minContains": 3, "maxContains": 1},
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"uniqueItems": True, "type": "object"},
    {"then": False, "else": False},
    {"if": {"const": 1}},
    {"if": {"const": 1}, "then": {}, "else": {"title": "x"}},
    {"not": False},
    {"not": {"not": {}}},
    {"type": "string", "not": {"type": ["null", "number"]}},
    {"unevaluatedProperties": True},
    {"unevaluatedProperties": {"description": "any"}},
    {"unevaluatedProperties": False, "additionalProperties": TEXT},
    {"unevaluatedItems": {}},
    {"unevaluatedItems": False, "items": TEXT},
]
SOMETHING_SAID: list[Any] = [
    {"propertyNames": {"pattern": "^a"}},
    {"propertyNames": {"type": "integer"}},
    {"propertyNames": {"minLength": 1}},
    {"propertyNames": {"not": {"const": "a"}}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"dependencies": {"a": ["b"]}},
    {"contains": True},
    {"contains": True, "minContains": 2, "minItems": 1},
    {"contains": True, "minContains": 0, "maxContains": 1},
    {"uniqueItems": True},
    {"if": {"const": 1}, "then": False},
    {"if": {"const": 1}, "else": {"type": "string"}},
    {"not": {}},
    {"not": {"type": "string"}},
    {"unevaluatedProperties": False},
    {"unevaluatedItems": False, "prefixItems": [TEXT]},
]


@pytest.mark.parametrize("schema", NOTHING_SAID)
def test_a_keyword_that_says_nothing_is_left_out(schema: Any) -> None:
    kept = {keyword: value for keyword, value in schema.items() if keyword not in REFUSED_KEYWORDS}
    assert checked_schema(schema, "schema") == checked_schema(kept, "schema")


@pytest.mark.parametrize("schema", SOMETHING_SAID)
def test_a_keyword_that_says_something_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidParameter, match="cannot be guided by the keyword"):
        checked_schema(schema, "schema")


VALUES: list[Any] = [
    None, True, False, 0, 1, 5, 0.5, "", "a", "b", "aa\n", [], [1], [1, 1], ["a", 2], [1, 2, 3], {}, {"a": 1}, {"b": 1},
    {"a": 1, "b": "x"}, {"a": {}, "c": []}, {"c": 1, "a": 1, "b": 1},
]  # fmt: skip
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
names, counts = st.sampled_from(["a", "b"]), st.integers(0, 3)


def _schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    maps, several = st.dictionaries(names, inner, max_size=2), st.lists(inner, min_size=1, max_size=2)
    keywords: Any = {
        "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
        "required": st.lists(names, max_size=2, unique=True),
        "enum": st.lists(st.sampled_from(["a", 1, None]), min_size=1, max_size=2, unique=True),
        "pattern": st.sampled_from(["", ".*", "^a", "a"]),
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=2),
        "uniqueItems": st.booleans(),
        **dict.fromkeys(("minLength", "minItems", "maxItems", "minContains", "maxContains", "minProperties",
                         "maxProperties", "minimum"), counts),
        **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), maps),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
        **dict.fromkeys(("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
                         "unevaluatedProperties", "unevaluatedItems"), inner),
    }  # fmt: skip
    return st.fixed_dictionaries({}, optional=keywords) | st.sampled_from(sorted(keywords)).flatmap(
        lambda keyword: st.fixed_dictionaries({keyword: keywords[keyword]})
    )


@settings(max_examples=examples(150), deadline=None)
@given(st.recursive(st.booleans() | st.just({}) | types.map(lambda name: {"type": name}), _schema, max_leaves=6))
@example({"contains": True, "minContains": 0, "unevaluatedItems": False})
def test_no_value_depends_on_a_keyword_without_effect(schema: Any) -> None:
    if isinstance(schema, bool):
        return
    effects = Effects(SchemaBudget(), "schema")
    removed = {key for key in schema if key in REFUSED_KEYWORDS and effects.has_none(key, schema)}
    for judged, *others in (("contains", "minContains", "maxContains"), ("then", "if"), ("else", "if")):
        if judged in schema and judged not in removed:
            removed -= {*others}  # they change what it says
    without = {key: value for key, value in schema.items() if key not in removed}
    for value in VALUES:
        assert Draft202012Validator(schema).is_valid(value) == Draft202012Validator(without).is_valid(value), value
