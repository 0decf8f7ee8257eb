"""Which JSON value a written argument stands for."""

import json
from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.core.events import TextDelta, ToolCallDelta
from vllm_mlx.formats.bodies.json_scanner import JsonScanner, json_value

from .support import cuts, run, tool

NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
BOOK = {"type": "object", "properties": {"title": {"type": "string"}}}
CASES: list[tuple[dict[str, Any] | None, str, Any]] = [
    ({"type": "string"}, "1", "1"),
    ({"type": "string"}, "true", "true"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, ' "q" \n\t', ' "q" \n\t'),
    ({"type": "integer"}, "42", 42),
    ({"type": "integer"}, " 5.0 ", 5),
    ({"type": "integer"}, "many", "many"),
    ({"type": "integer"}, "1.5", 1.5),
    ({"type": "integer"}, "null", "null"),
    ({"type": "number"}, "-1.5e3", -1500.0),
    ({"type": "number"}, "5.0", 5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "null"}, "null", None),
    ({"type": "array"}, '[{"a": 1}, "b"]', [{"a": 1}, "b"]),
    ({"type": "array", "items": BOOK}, '[\n {"title": "x"}\n]', [{"title": "x"}]),
    ({"type": "array"}, "[1, 2", "[1, 2"),
    (BOOK, '{"title": "1\\n"}', {"title": "1\n"}),
    (BOOK, "{'title': 'x', 'new': True, 'ids': (1, None)}", {"title": "x", "new": True, "ids": [1, None]}),
    (BOOK, "{'title': it's}", "{'title': it's}"),
    ({"type": ["object", "string"]}, "{'title': 1}", "{'title': 1}"),
    ({"type": "array"}, '["a", False,]', ["a", False]),
    ({"type": "array"}, "{'a', 'b'}", ["a", "b"]),
    ({"type": "integer"}, "01234", 1234),
    ({"type": "integer"}, "-007", -7),
    ({"type": ["string", "integer"]}, "01234", "01234"),
    ({}, "01234", "01234"),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "none", "none"),
    ({"type": ["string", "null"]}, "nullable", "nullable"),
    ({"type": ["string", "null"]}, "7", "7"),
    ({"type": ["string", "integer"]}, "7", 7),
    ({"type": ["string", "integer"]}, "7.5", "7.5"),
    (NULLABLE, "null", None),
    (NULLABLE, "3", 3),
    ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "true", True),
    ({"oneOf": [{"type": "boolean"}, {}]}, "3", 3),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "3", "3"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"const": None}, "null", None),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"$ref": "#/$defs/Size"}, "7", 7),
    ({"$ref": "#/$defs/Missing"}, "7", 7),
    ({"$ref": "#/$defs/Loop"}, "7", 7),
    ({"properties": {}}, "{}", {}),
    ({}, "7", 7),
    (None, "[1]", [1]),
    (None, '{"a": {"b": "</x>"}}', {"a": {"b": "</x>"}}),
    (None, "-7", -7),
    (None, "007", "007"),
    (None, "1.2.3", "1.2.3"),
    (None, "true", True),
    (None, "truely", "truely"),
    (None, "True", "True"),
    (None, "null", None),
    (None, '"quoted"', '"quoted"'),
    (None, "plain <b>", "plain <b>"),
    (None, "", ""),
    (None, "2024-01-02", "2024-01-02"),
    (None, "1" * 500, "1" * 500),
    (None, " " * 500 + "1", " " * 500 + "1"),
    (None, "[" * 5000, "[" * 5000),
]


def arguments(schema: dict[str, Any] | None, pieces: list[str]) -> Any:
    spec = tool("f") if schema is None else tool("f", p=schema)
    spec["function"]["parameters"]["$defs"] = {"Size": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}
    events = run(pieces, tools="qwen3_xml", tool_specs=[spec])
    return json.loads("".join(event.arguments for event in events if isinstance(event, ToolCallDelta)))


@row("S4-17")
@pytest.mark.parametrize(("schema", "written", "value"), CASES)
def test_value_by_schema(schema: dict[str, Any] | None, written: str, value: Any) -> None:
    text = f"<tool_call><function=f><parameter=p>\n{written}\n</parameter></function></tool_call>"
    for pieces in cuts(text) if len(text) < 200 else ([text], list(text)):
        got = arguments(schema, pieces)
        assert got == {"p": value}
        assert type(got["p"]) is type(value)


@row("S4-17")
def test_books_are_not_serialised_twice() -> None:
    text = '<tool_call><function=f><parameter=books>\n[{"title": "x"}]\n</parameter></function></tool_call>'
    assert arguments({"type": "string"}, [text]) == {"books": [{"title": "x"}]}


DSML = "｜DSML｜"
WRITTEN: list[tuple[Any, str, str, Any]] = [
    ({"type": "string"}, "false", "42", "42"),
    ({"type": "string"}, "false", '"Rome"', "Rome"),
    ({"type": "string"}, "false", '{"a": 1}', '{"a": 1}'),
    ({"type": "string"}, "true", '"Rome"', '"Rome"'),
    ({"type": "integer"}, "true", "42", 42),
    ({"type": "integer"}, "false", '"42"', 42),
    ({"type": "integer"}, "true", "many", "many"),
    ({"type": "array"}, "true", "[1]", [1]),
    ({"type": ["string", "null"]}, "true", "null", "null"),
    ({"type": ["string", "null"]}, "false", "null", None),
    ({"type": ["string", "integer"]}, "true", "7", "7"),
    (None, "true", "7", "7"),
    (None, "false", "7", 7),
    (None, "false", '"7"', "7"),
]


def written(*parameters: tuple[str, str, str]) -> str:
    inner = "".join(
        f'<{DSML}parameter name="{name}" string="{kind}">{value}</{DSML}parameter>\n'
        for name, kind, value in parameters
    )
    return f'<{DSML}invoke name="f">\n{inner}</{DSML}invoke>\n</{DSML}tool_calls>'


def dsml_arguments(schema: dict[str, Any] | None, text: str, **options: Any) -> Any:
    spec = tool("f") if schema is None else tool("f", p=schema)
    found = []
    for pieces in cuts(text):
        events = run(pieces, reasoning=None, tools="deepseek_v4", tool_specs=[spec], **options)
        assert not any(isinstance(event, TextDelta) for event in events)
        found.append(json.loads("".join(event.arguments for event in events if isinstance(event, ToolCallDelta))))
    assert all(value == found[0] for value in found)
    return found[0]


@row("S4-17")
@pytest.mark.parametrize(("schema", "kind", "text", "value"), WRITTEN)
def test_the_schema_counts_before_what_the_model_says(schema: Any, kind: str, text: str, value: Any) -> None:
    """The calls have no wrapper, too."""
    got = dsml_arguments(schema, written(("p", kind, text)))
    assert got == {"p": value}
    assert type(got["p"]) is type(value)


@pytest.mark.parametrize("name", ["arguments", "input"])
@pytest.mark.parametrize("kind", ["true", "false"])
def test_an_object_of_all_arguments_in_one_of_them(name: str, kind: str) -> None:
    inner = '{"p": "x", "q": [1, {}]}'
    assert dsml_arguments({}, written((name, kind, inner))) == {"p": "x", "q": [1, {}]}
    assert dsml_arguments({}, written((name, "true", "x"))) == {name: "x"}
    assert dsml_arguments({}, written((name, kind, inner), ("q", "true", "y"))) == {name: json.loads(inner), "q": "y"}
    cut_off = run(
        [written((name, kind, inner))[:-60]], reasoning=None, tools="deepseek_v4", tool_specs=[tool("f", p={})]
    )
    assert cut_off[1].arguments.startswith('{"p": "x"')


def test_a_declared_argument_of_that_name_is_one() -> None:
    spec = tool("f", input={"type": "object"})
    events = run([written(("input", "false", '{"p": 1}'))], reasoning=None, tools="deepseek_v4", tool_specs=[spec])
    assert ToolCallDelta(0, '{"input": {"p": 1}}') in events


def test_additional_properties_give_the_type() -> None:
    spec = tool("f")
    spec["function"]["parameters"]["additionalProperties"] = {"type": "string"}
    text = "<tool_call><function=f><parameter=p>1</parameter></function></tool_call>"
    assert ToolCallDelta(0, '{"p": "1"}') in run([text], tool_specs=[spec])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "x\ny\t\x01"}', {"a": "x\ny\t\x01"}),
        ('{"a": "\\d\\u12g\\é"}', {"a": "\\d\\u12g\\é"}),
        ('{"a": "\\ud83d\\ude42"}', {"a": "🙂"}),
        ("  [1 , 2]  ", [1, 2]),
        ("0", 0),
        ("-0.5E+2", -50.0),
    ],
)
def test_json_is_repaired_in_strings_only(text: str, value: Any) -> None:
    repaired = json_value(text)
    assert repaired is not None
    assert json.loads(repaired) == value


@pytest.mark.parametrize(
    "text",
    ["", "{", "{a: 1}", "{'a': 1}", "[1,]", '{"a": 1,}', "01", "1.", "+1", "NaN", "tru", "[1] 2", '"a', "[}", "²"],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    assert json_value(text) is None


def test_scanner_stops_behind_its_value() -> None:
    scanner = JsonScanner()
    assert scanner.consume('x{"a": [1]} tail', 1) == len('x{"a": [1]}')
    assert scanner.done
    assert scanner.take() == '{"a": [1]}'


def test_depth_is_bounded() -> None:
    events = run(['<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000])
    assert isinstance(events[-1], TextDelta)
