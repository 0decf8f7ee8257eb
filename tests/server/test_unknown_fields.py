"""A field that this server does not know is refused by name, or left out and reported, in every protocol."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from tests.support.protocols import PROTOCOLS
from tests.support.running import Running, eventually, serving
from vllm_mlx.api.wire import MAX_UNKNOWN
from vllm_mlx.server.request_log import MAX_WARNINGS, UNKNOWN_HEADER

from .fakes import FakeEngine

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NOWHERE = "http://127.0.0.1:9"  # the model of these tests asks for no search
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: Any = {"role": "user", "content": "hi"}
ASKED: Any = {**{protocol.path: protocol.body(HI) for protocol in PROTOCOLS.values()}, COUNT: {"messages": [HI]}}
PART: Any = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
INPUT_PART: Any = {"role": "user", "content": [{"type": "input_text", "text": "hi", "spin": 1}]}
TOOL: Any = {"type": "function", "function": {"name": "ls"}}
OBJECT: Any = {"type": "json_object"}
SCHEMA: Any = {
    "name": "x",
    "schema": {"type": "object", "title": "a user's keyword"},
    "strict": True,
    "description": "x",
}
FORMAT: Any = {"type": "json_schema", "json_schema": SCHEMA}
FLAT: Any = {"type": "json_schema", **SCHEMA}
STRUCTURE: Any = {"begin": "<a>", "schema": {}, "end": "</a>"}
TAG: Any = {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<a"]}
CUSTOM: Any = {"type": "custom", "name": "patch"}
FUNCTION: Any = {"type": "function", "name": "ls"}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
WEB: Any = {"type": "web_search"}
# What is sent, the same without the unknown field, and how the field is named.
CASES: Any = [
    (CHAT, {"mind": 1}, {}, "mind"),
    (CHAT, {"messages": [HI | {"mood": "gay"}]}, {}, "messages[].mood"),
    (CHAT, {"messages": [{**PART, "content": [{**PART["content"][0], "spin": 1}]}]}, {"messages": [PART]},
     "messages[].content[].spin"),
    (CHAT, {"tools": [{**TOOL, "hint": 1}]}, {"tools": [TOOL]}, "tools[].hint"),
    (CHAT, {"tools": [TOOL | {"function": {"name": "ls", "hint": 1}}]}, {"tools": [TOOL]}, "tools[].function.hint"),
    (CHAT, {"structured_outputs": {"regex": "a", "mode": 1}}, {"structured_outputs": {"regex": "a"}},
     "structured_outputs.mode"),
    (CHAT, {"": 1}, {}, '""'),
    (CHAT, {"messages": [HI | {"": 1}]}, {}, 'messages[].""'),
    (CHAT, {"a, b\n": 1}, {}, '"a, b\\n"'),
    (CHAT, {"ümlaut": 1}, {}, "ümlaut"),
    (COMPLETIONS, {"mind": [1]}, {}, "mind"),
    (RESPONSES, {"mind": {}}, {}, "mind"),
    (RESPONSES, {"reasoning": {"depth": 3}}, {"reasoning": {}}, "reasoning.depth"),
    (CHAT, {"response_format": {**OBJECT, "mode": 1}}, {"response_format": OBJECT}, "response_format.mode"),
    (CHAT, {"response_format": FORMAT | {"mode": 1}}, {"response_format": FORMAT}, "response_format.mode"),
    (CHAT, {"response_format": FORMAT | {"json_schema": SCHEMA | {"mode": 1}}}, {"response_format": FORMAT},
     "response_format.json_schema.mode"),
    (CHAT, {"response_format": FORMAT | {"json_schema": SCHEMA | {"type": 1}}}, {"response_format": FORMAT},
     "response_format.json_schema.type"),
    (COMPLETIONS, {"response_format": TAG | {"mode": 1}}, {"response_format": TAG}, "response_format.mode"),
    (CHAT, {"response_format": TAG | {"structures": [STRUCTURE | {"mode": 1}]}}, {"response_format": TAG},
     "response_format.structures[].mode"),
    (CHAT, {"structured_outputs": {"structural_tag": TAG | {"mode": 1}}},
     {"structured_outputs": {"structural_tag": TAG}}, "structured_outputs.structural_tag.mode"),
    (CHAT, {"structured_outputs": {"structural_tag": json.dumps(TAG | {"mode": 1})}},
     {"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structured_outputs.structural_tag.mode"),
    (CHAT, {"tools": [CUSTOM | {"format": {"type": "text", "mode": 1}}]}, {"tools": [CUSTOM]}, "tools[].format.mode"),
    (CHAT, {"tools": [CUSTOM | {"parameters": {}}]}, {"tools": [CUSTOM]}, "tools[].parameters"),
    (RESPONSES, {"text": {"format": {**OBJECT, "mode": 1}}}, {"text": {"format": OBJECT}}, "text.format.mode"),
    (RESPONSES, {"text": {"format": FLAT | {"mode": 1}}}, {"text": {"format": FLAT}}, "text.format.mode"),
    (RESPONSES, {"tools": [FUNCTION], "tool_choice": {**FUNCTION, "mode": 1}},
     {"tools": [FUNCTION], "tool_choice": FUNCTION}, "tool_choice.mode"),
]  # fmt: skip
# The same for types whose unknown fields are always left out.
TOLERATED: Any = [
    (RESPONSES, {"input": [HI | {"mood": "gay"}]}, {}, "input[].mood"),
    (RESPONSES, {"input": [INPUT_PART]}, {}, "input[].content[].spin"),
    (RESPONSES, {"tools": [{"type": "function", "name": "ls", "hint": 1}]},
     {"tools": [{"type": "function", "name": "ls"}]}, "tools[].hint"),
    (MESSAGES, {"mind": 1}, {}, "mind"),
    (MESSAGES, {"messages": [HI | {"mood": "gay"}]}, {}, "messages[].mood"),
    (MESSAGES, {"messages": [{**PART, "content": [{**PART["content"][0], "spin": 1}]}]}, {},
     "messages[].content[].spin"),
    (MESSAGES, {"tools": [{"name": "ls", "input_schema": {}, "hint": 1}]},
     {"tools": [{"name": "ls", "input_schema": {}}]}, "tools[].hint"),
    (MESSAGES, {"safeguards": [{"type": "dangerous_tool_use"}]}, {}, "safeguards"),
    (COUNT, {"mind": 1}, {}, "mind"),
    (MESSAGES, {"output_config": {"format": FLAT | {"mode": 1}}}, {"output_config": {"format": FLAT}},
     "output_config.format.mode"),
    (MESSAGES, {"output_format": FLAT | {"mode": 1}}, {"output_format": FLAT}, "output_format.mode"),
    (MESSAGES, {"tools": [SEARCH | {"mode": 1}]}, {"tools": [SEARCH]}, "tools[].mode"),
    (MESSAGES, {"tools": [SEARCH | {"user_location": {"mode": 1}}]}, {"tools": [SEARCH]}, "tools[].user_location.mode"),
    (RESPONSES, {"tools": [WEB | {"mode": 1}]}, {"tools": [WEB]}, "tools[].mode"),
    (RESPONSES, {"tools": [WEB | {"filters": {"mode": 1}}]}, {"tools": [WEB]}, "tools[].filters.mode"),
    (RESPONSES, {"tools": [WEB | {"user_location": {"mode": 1}}]}, {"tools": [WEB]}, "tools[].user_location.mode"),
    (RESPONSES, {"tools": [CUSTOM | {"format": {"type": "text", "mode": 1}}]}, {"tools": [CUSTOM]},
     "tools[].format.mode"),
]  # fmt: skip


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with serving(FakeEngine(), web_search=NOWHERE) as running:
        yield running


@pytest.fixture(scope="module")
def lenient() -> Iterator[Running]:
    with serving(FakeEngine(), unknown_fields="warn", web_search=NOWHERE) as running:
        yield running


def post(server: Running, path: str, fields: Any, agent: str = "strange/1.0") -> httpx.Response:
    with server.http(headers={"user-agent": agent}) as client:
        return client.post(path, json=ASKED[path] | fields)


def decoded(server: Running, path: str, fields: Any) -> Any:
    """What reaches the engine, without the id of the request."""
    post(server, path, fields).raise_for_status()
    seen = server.engine.counted if path == COUNT else server.engine.requests
    return replace(seen[-1], request_id="", arrived_s=0.0)


@pytest.mark.parametrize(("path", "sent", "meant", "name"), CASES)
def test_refused_by_default(strict: Running, path: str, sent: Any, meant: Any, name: str) -> None:
    answer = post(strict, path, sent)
    error = answer.json()["error"]
    where = name.replace("[]", "[0]")
    assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_parameter", where)
    assert f"`{where}`" in error["message"] and UNKNOWN_HEADER not in answer.headers


def whole_or_streamed() -> Iterator[Any]:
    """Each case whole and streamed. Every run has one of the two, in turns."""
    for number, case in enumerate([*CASES, *TOLERATED]):
        for stream in (False, True):
            yield pytest.param(*case, stream, marks=() if stream == bool(number % 2) else pytest.mark.full)


@pytest.mark.parametrize(("path", "sent", "meant", "name", "stream"), whole_or_streamed())
def test_left_out_and_reported(lenient: Running, path: str, sent: Any, meant: Any, name: str, stream: bool) -> None:
    streamed = {"stream": True} if stream and path != COUNT else {}
    assert unquote(post(lenient, path, sent | streamed).headers[UNKNOWN_HEADER]) == name
    assert UNKNOWN_HEADER not in post(lenient, path, meant | streamed).headers
    assert decoded(lenient, path, sent) == decoded(lenient, path, meant)


@pytest.mark.parametrize(("path", "sent", "meant", "name"), TOLERATED)
def test_tolerated_fields_are_reported_by_default(strict: Running, path: str, sent: Any, meant: Any, name: str) -> None:
    assert post(strict, path, sent).headers[UNKNOWN_HEADER] == name
    assert decoded(strict, path, sent) == decoded(strict, path, meant)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "ghost", "content": "hi"}]}),
        (CHAT, {"messages": [{**PART, "content": [{"type": "smell"}]}]}),
        (CHAT, {"tools": [{"type": "charm"}]}),
        (CHAT, {"reasoning_effort": "heroic"}),
        (CHAT, {"store": True}),
        (CHAT, {"suffix": "x"}),
        (CHAT, {"temperature": "hot"}),
        (COMPLETIONS, {"logprobs": -1}),
        (RESPONSES, {"input": [{"type": "riddle"}]}),
        (RESPONSES, {"truncation": "end"}),
        (CHAT, {"response_format": {"type": "text", "json_schema": SCHEMA}}),
        (CHAT, {"response_format": FORMAT | {"triggers": ["<a"]}}),
        (RESPONSES, {"text": {"format": {"type": "text", "schema": {}}}}),
        (MESSAGES, {"output_format": OBJECT | {"schema": {}}}),
        (CHAT, {"tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "lark"}}]}),
        (CHAT, {"tools": [CUSTOM | {"format": {"type": "tree"}}]}),
        (CHAT, {"structured_outputs": {"structural_tag": TAG | {"type": "tree"}}}),
        (RESPONSES, {"tools": [WEB | {"user_location": "here"}]}),
        (RESPONSES, {"reasoning": {"mode": "pro"}}),
        (MESSAGES, {"messages": [{**PART, "content": [{"type": "smell"}]}]}),
        (MESSAGES, {"thread": {"type": "continue", "previous_message_id": "msg_1"}}),
        (COUNT, {"messages": [{"role": "ghost", "content": "hi"}]}),
    ],
)
def test_values_and_types_that_are_not_known_stay_errors(lenient: Running, path: str, fields: Any) -> None:
    assert post(lenient, path, fields).status_code == 400


def test_a_null_is_no_field(strict: Running, lenient: Running) -> None:
    for server in (strict, lenient):
        for path in ASKED:
            answer = post(server, path, {"mind": None})
            assert answer.status_code == 200 and UNKNOWN_HEADER not in answer.headers


def warnings_about(caplog: pytest.LogCaptureFixture, client: str) -> list[str]:
    logged = [record.getMessage() for record in caplog.records]
    return [line for line in logged if line.startswith(f"{client} sent the field ")]


def test_a_warning_for_each_field_and_client(lenient: Running, caplog: pytest.LogCaptureFixture) -> None:
    for agent in ("one/1.0", "one/1.0", "two/2.0"):
        post(lenient, CHAT, {"mind_a": 1, "messages": [HI | {"mind_b": 1}] * 3}, agent)
    eventually(lambda: len(warnings_about(caplog, "two/2.0")) == 2)
    for agent in ("one/1.0", "two/2.0"):
        first, second = warnings_about(caplog, agent)
        assert " mind_a to /v1/chat/completions," in first and " messages[].mind_b to " in second


def test_names_that_a_client_chooses_are_bounded_and_quoted(lenient: Running, caplog: pytest.LogCaptureFixture) -> None:
    odd = 'a\r\nx-evil: 1, "ü\U0001f600'
    answer = post(lenient, CHAT, {odd: 1})
    assert answer.headers[UNKNOWN_HEADER].isascii() and "x-evil" not in answer.headers
    assert " " not in answer.headers[UNKNOWN_HEADER] and not any("\n" in line for line in caplog.messages)
    many = post(lenient, CHAT, {f"field{number}": 1 for number in range(1000)} | {"b" * 100_000: 1})
    assert many.status_code == 200 and len(many.headers[UNKNOWN_HEADER]) < 1000
    long = post(lenient, CHAT, {f"{number}" + "\U0001f600" * 100: 1 for number in range(50)})
    assert long.status_code == 200 and len(long.headers[UNKNOWN_HEADER]) < 4096
    half = json.dumps(ASKED[CHAT])[:-1] + ', "\\ud83d": 1}'  # half a pair, which is no text
    answer = httpx.post(f"{lenient.url}{CHAT}", content=half, headers={"content-type": "application/json"})
    assert unquote(answer.headers[UNKNOWN_HEADER]) == "\ufffd"
    assert many.headers[UNKNOWN_HEADER].split(", ")[MAX_UNKNOWN:] == ["..."]


def test_warnings_end_after_many(caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeEngine(), unknown_fields="warn") as server:
        for start in range(0, MAX_WARNINGS + 100, MAX_UNKNOWN):
            post(server, CHAT, {f"field{start + number}": 1 for number in range(MAX_UNKNOWN)}, "many/1.0")
    warned = warnings_about(caplog, "many/1.0")
    assert len(warned) == MAX_WARNINGS and "the last such warning" in warned[-1]
