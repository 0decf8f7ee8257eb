"""Which defaults a tool's schema declares, and for which arguments."""

from typing import Any

import pytest

from vllm_mlx.core.messages import ToolSpec
from vllm_mlx.prompt.declared import Declared, declared_arguments


def declared(schema: Any) -> Declared:
    return declared_arguments([ToolSpec("f", None, schema)])["f"]


def defaults(schema: Any, *path: str) -> list[Any]:
    at: Declared | None = declared(schema)
    for name in path:
        assert at is not None
        at = at.items if name == "[]" else at.argument(name)
    return [] if at is None else list(at.defaults())


FALSE: Any = {"type": "boolean", "default": False}


def test_defaults_are_found_at_any_depth() -> None:
    schema = {"properties": {"a": FALSE, "list": {"items": {"properties": {"b": {"default": 5}}}}, "c": {}}}
    assert defaults(schema, "a") == [False]
    assert defaults(schema, "list", "[]", "b") == [5]
    assert defaults(schema, "c") == defaults(schema, "none") == []


def test_references_and_alternatives_are_followed() -> None:
    schema = {
        "$defs": {"x": {"anyOf": [{"default": 1}, {"$ref": "#/$defs/y"}]}, "y": {"default": 2}},
        "allOf": [{"properties": {"a": {"$ref": "#/$defs/x"}}}],
    }
    assert sorted(defaults(schema, "a")) == [1, 2]


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema = {"properties": {"a": {"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/a"}, {"default": 1}]}}}
    assert defaults(schema, "a") == defaults(schema, "a", "a", "a") == [1]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5},
        {"properties": {"a": 5}},
        {"properties": {"a": {"$ref": 5, "anyOf": 7, "allOf": [1, None]}}},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a": {"$ref": "http://127.0.0.1/"}}},
        {"items": 3},
    ],
)
def test_what_has_no_form_of_a_schema_declares_nothing(schema: Any) -> None:
    assert defaults(schema, "a") == defaults(schema, "[]") == []


def test_the_work_for_one_value_is_bounded() -> None:
    layer: Any = {"default": 0}
    for number in range(30):
        layer = {"default": number + 1, "anyOf": [dict(layer) for _ in range(30)]}
    assert len(defaults({"properties": {"a": layer}}, "a")) <= 64


def test_a_default_that_nests_deeper_than_replies_do_counts_as_none() -> None:
    deep: Any = 0
    for _ in range(900):
        deep = [deep]
    assert defaults({"properties": {"a": {"default": deep}}}, "a") == []
