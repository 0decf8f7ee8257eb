"""Which messages of a client are replies that were given."""

from typing import Any

import pytest

from vllm_mlx.core.messages import ImagePart, Message, Part, ReasoningPart, TextPart, ToolCallPart, ToolSpec
from vllm_mlx.prompt.echo import DeclaredValue, declared_arguments, is_echo, is_same


def message(*parts: Part) -> Message:
    return Message("assistant", parts)


def call(arguments: dict[str, Any], *, name: str = "f", call_id: str = "c1") -> ToolCallPart:
    return ToolCallPart(call_id, name, arguments)


REPLY = message(ReasoningPart("hm\n"), TextPart(" ok "), call({"b": 1.0, "a": {"x": [1, {"y": None}]}}))
ARGUMENTS = {"b": 1.0, "a": {"x": [1, {"y": None}]}}
SCHEMA = {
    "properties": {
        "all": {"type": "boolean", "default": False},
        "a": {"properties": {"w": {"default": 0}, "x": {"items": {"properties": {"z": {"default": "default"}}}}}},
    }
}
TOOLS = declared_arguments([ToolSpec("f", None, SCHEMA)])


@pytest.mark.parametrize(
    "parts",
    [
        REPLY.parts,
        (TextPart(" ok "), call(ARGUMENTS)),
        (ReasoningPart("hm"), TextPart("ok"), call({"a": {"x": [1, {"y": None}]}, "b": 1})),
        (ReasoningPart("\n hm"), TextPart("\nok"), call(ARGUMENTS, call_id="another")),
        (TextPart("o"), call(ARGUMENTS), TextPart("k")),
        (TextPart("ok"), call({"all": False, **ARGUMENTS})),
        (TextPart("ok"), call({"b": 1, "a": {"x": [1, {"y": None, "z": "default"}], "w": 0}})),
    ],
)
def test_a_reply_is_known_however_it_was_written_again(parts: tuple[Part, ...]) -> None:
    assert is_echo(message(*parts), REPLY, TOOLS)


@pytest.mark.parametrize(
    "parts",
    [
        (TextPart("ok"),),
        (TextPart("OK"), call(ARGUMENTS)),
        (TextPart("o k"), call(ARGUMENTS)),
        (ReasoningPart("ha"), TextPart("ok"), call(ARGUMENTS)),
        (TextPart("ok"), call(ARGUMENTS), call(ARGUMENTS)),
        (TextPart("ok"), call(ARGUMENTS, name="g")),
        (TextPart("ok"), call({"b": 1.0})),
        (TextPart("ok"), call({**ARGUMENTS, "b": 2})),
        (TextPart("ok"), call({**ARGUMENTS, "b": True})),
        (TextPart("ok"), call({**ARGUMENTS, "b": "1.0"})),
        (TextPart("ok"), call({**ARGUMENTS, "a": {"x": [{"y": None}, 1]}})),
        (TextPart("ok"), call({**ARGUMENTS, "a": {"x": [1, {"y": None}, 2]}})),
        (TextPart("ok"), call({**ARGUMENTS, "all": False}, call_id="another")),
        (TextPart("ok"), call({**ARGUMENTS, "all": True})),
        (TextPart("ok"), call({**ARGUMENTS, "all": 0})),
        (TextPart("ok"), call({**ARGUMENTS, "dry_run": False})),
        (TextPart("ok"), call({"b": 1.0, "all": False})),
        (TextPart("ok"), call({"b": 1, "a": {"x": [1, {"y": None, "z": "other"}]}})),
        (TextPart("ok"), call({"b": 1, "a": {"x": [1, {"y": None}], "w": 0, "v": 0}})),
        (*REPLY.parts, ImagePart("data:,")),
    ],
)
def test_a_changed_reply_is_none(parts: tuple[Part, ...]) -> None:
    assert not is_echo(message(*parts), REPLY, TOOLS)


def test_what_no_tool_declares_is_an_edit() -> None:
    sent = message(TextPart("ok"), call({"all": False, **ARGUMENTS}))
    assert is_echo(sent, REPLY, TOOLS) and not is_echo(sent, REPLY)


def test_only_the_assistant_repeats_replies() -> None:
    assert not is_echo(Message("user", (TextPart("ok"),)), message(TextPart("ok")))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(True, 1, False), (0, False, False), (1, 1.0, True), (None, 0, False), ("1", 1, False)],
)
def test_values_are_compared_as_json(one: Any, other: Any, expected: bool) -> None:
    assert is_same(message(call({"a": one})), message(call({"a": other}))) is expected


def test_the_same_reply_has_the_same_reasoning_and_no_more_arguments() -> None:
    assert is_same(message(ReasoningPart(" hm"), TextPart("ok")), message(ReasoningPart("hm\n"), TextPart("ok\n")))
    assert not is_same(message(TextPart("ok")), message(ReasoningPart("hm"), TextPart("ok")))
    assert not is_same(message(call({"a": 1, "b": 2})), message(call({"a": 1})))


def declared(schema: Any) -> DeclaredValue:
    return declared_arguments([ToolSpec("f", None, schema)])["f"]


def defaults(schema: Any, *path: str) -> list[Any]:
    at: DeclaredValue | None = declared(schema)
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
