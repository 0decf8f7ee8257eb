"""A body in the form of Responses on the path of chat completions, as Cursor sends it, is answered as a chat."""

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.api.streams import chunks, folded_choice
from vllm_mlx.core.events import (
    FinishReason,
    GenerationEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_mlx.core.messages import ReasoningPart, TextPart, ToolCallPart, ToolResultPart

from .fakes import FakeEngine, finished

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PATCH = '*** Begin Patch\n*** Add File: ü.txt\n+"quoted" \\ text\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'}
READ: Any = {"type": "function", "name": "ReadFile", "description": "Read.", "parameters": {"type": "object"}}
APPLY: Any = {"type": "custom", "name": "ApplyPatch", "description": "Edit.", "format": GRAMMAR}
# As users of Cursor recorded it: https://forum.cursor.com/t/159298 and /t/153019.
CURSOR: Any = {
    "model": "tiny",
    "input": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "input_text", "text": "Add a file."}]},
    ],
    "tools": [READ, APPLY],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "prompt_cache_retention": "24h",
    "truncation": "disabled",
    "previous_response_id": None,
    "user": "somebody",
    "stream_options": {"include_usage": True},
    "stream": True,
}
TEXTS = ("I read ", "it.")


def calls(name: str, arguments: str, pieces: int = 3) -> list[GenerationEvent]:
    size = max(1, len(arguments) // pieces)
    parts = [arguments[start : start + size] for start in range(0, len(arguments), size)]
    return [ToolCallStart(0, "call_1", name), *(ToolCallDelta(0, part) for part in parts), ToolCallEnd(0)]


def script(*events: GenerationEvent, reason: FinishReason = FinishReason.TOOL_CALLS) -> Any:
    said = (Started(7, 2), ReasoningDelta("Let me see."), *map(TextDelta, TEXTS), *events, finished(reason))
    return lambda request, index: said


def streamed(http: httpx.Client, body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The choice that the chunks make, and all chunks."""
    answer = http.post(CHAT, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    found = chunks(answer.content)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in found)
    return folded_choice(answer.content, 0), found


def complete(http: httpx.Client, body: Any) -> dict[str, Any]:
    unasked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    answer = http.post(CHAT, json=unasked).json()
    assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == 7
    [choice] = answer["choices"]
    return dict(choice)


@pytest.mark.parametrize(
    ("events", "written"),
    [
        ([], None),
        (calls("ReadFile", '{"path": "a"}'), ("ReadFile", '{"path": "a"}')),
        (calls("ReadFile", ""), ("ReadFile", "{}")),
        (calls("ApplyPatch", json.dumps({"input": PATCH}), 7), ("ApplyPatch", PATCH)),
        (calls("ApplyPatch", json.dumps({"patch": 1})), ("ApplyPatch", '{"patch": 1}')),
        (calls("ApplyPatch", ""), ("ApplyPatch", "{}")),
        (calls("ApplyPatch", '{"input": "*** Beg')[:-1], ("ApplyPatch", '{"input": "*** Beg')),  # cut off
    ],
)  # fmt: skip
def test_the_answer_is_a_chat_completion(http: httpx.Client, engine: FakeEngine, events: Any, written: Any) -> None:
    reason = FinishReason.TOOL_CALLS if events and isinstance(events[-1], ToolCallEnd) else FinishReason.LENGTH
    engine.play = script(*events, reason=reason)
    choice, sent = streamed(http, CURSOR)
    message = choice["message"]
    assert choice == complete(http, CURSOR)
    assert (message["content"], message["reasoning_content"]) == ("".join(TEXTS), "Let me see.")
    assert choice["finish_reason"] == reason.value
    assert sent[-1]["choices"] == [] and sent[-1]["usage"]["total_tokens"] == 10
    if written is not None:
        function = dict(zip(("name", "arguments"), written, strict=True))
        assert message["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]


def test_the_request_is_that_of_responses(http: httpx.Client, engine: FakeEngine) -> None:
    body = {name: value for name, value in CURSOR.items() if name not in ("stream", "stream_options")}
    for path in (CHAT, RESPONSES):
        http.post(path, json=body).raise_for_status()
    chat, response = (replace(request, request_id="", arrived_s=0.0, path="") for request in engine.requests)
    assert chat == response and chat.tools[1].name == "ApplyPatch"


NESTED: Any = {"type": "function", "function": {name: value for name, value in READ.items() if name != "type"}}


def test_tools_of_both_forms_among_messages(http: httpx.Client, engine: FakeEngine) -> None:
    """As Cursor's ask mode sends them: a chat whose custom tools have the form of Responses."""
    asked = {"role": "user", "content": "Add a file."}
    engine.play = script(*calls("ApplyPatch", json.dumps({"input": PATCH}), 5))
    choice, _ = streamed(http, {"messages": [asked], "tools": [NESTED, APPLY]})
    assert choice == complete(http, {"messages": [asked], "tools": [READ, APPLY]})
    [called] = choice["message"]["tool_calls"]
    assert called["function"]["arguments"] == PATCH and called["type"] == "function"
    streamed(http, {"input": [asked], "tools": [READ, APPLY]})
    assert len({request.tools[0].name for request in engine.requests}) == 1
    first, second, third = (request.tools for request in engine.requests)
    assert [tool.to_openai() for tool in first] == [tool.to_openai() for tool in second]
    assert [tool.to_openai() for tool in first] == [tool.to_openai() for tool in third]

    call = {"id": "call_1", "type": "function", "function": {"name": "ApplyPatch", "arguments": PATCH}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Done."}
    past = [asked, {"role": "assistant", "tool_calls": [call]}, result]
    streamed(http, {"messages": past, "tools": [NESTED, APPLY]})
    assert engine.requests[-1].messages is not None
    assert engine.requests[-1].messages[1].parts == (ToolCallPart("call_1", "ApplyPatch", {"input": PATCH}),)


def test_a_conversation_comes_back_in_either_form_of_calls(http: httpx.Client, engine: FakeEngine) -> None:
    """Cursor was given the call of a custom tool as a function, and may send it back so."""
    called = [
        {"type": "custom_tool_call", "call_id": "call_1", "name": "ApplyPatch", "input": PATCH},
        {"type": "function_call", "call_id": "call_1", "name": "ApplyPatch", "arguments": PATCH},
        {"type": "function_call", "call_id": "call_1", "name": "ApplyPatch", "arguments": json.dumps({"input": PATCH})},
    ]
    result = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Done."}
    seen = []
    for call in called:
        reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
        streamed(http, CURSOR | {"input": [*CURSOR["input"], reasoning, call, result]})
        assert engine.requests[-1].messages is not None
        seen.append(engine.requests[-1].messages[2:])
    assert seen[0] == seen[1] == seen[2]
    assistant, tool = seen[0]
    assert assistant.parts == (ReasoningPart("Hm."), ToolCallPart("call_1", "ApplyPatch", {"input": PATCH}))
    assert tool.parts == (ToolResultPart("call_1", (TextPart("Done."),), "ApplyPatch"),)


def test_text_format_and_instructions(http: httpx.Client, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    streamed(http, {"input": "Hi.", "instructions": "Be brief.", "text": form, "max_output_tokens": 9})
    [request] = engine.requests
    assert request.messages is not None and request.sampling.guide is not None
    assert [message.role for message in request.messages] == ["system", "user"]
    assert (request.sampling.max_tokens, request.sampling.guide.param) == (9, "text.format.schema")


def test_openais_client_reads_the_stream(gpt: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play = script()
    extra = {name: value for name, value in CURSOR.items() if name not in ("model", "stream", "stream_options")}
    with gpt.chat.completions.stream(
        model="tiny", messages=openai.omit, stream_options={"include_usage": True}, extra_body=extra
    ) as stream:
        done = stream.get_final_completion()
    assert done.choices[0].message.content == "".join(TEXTS) and done.usage is not None


@pytest.mark.parametrize(
    ("fields", "param", "advice"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "input", "not supported together with `messages`. Send"),
        ({"messages": []}, "messages", "not supported together with `input`. It is empty: leave it out."),
        ({"max_tokens": 5}, "max_tokens", "`max_output_tokens`"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "`max_output_tokens`"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "`reasoning.effort`"),
        ({"response_format": {"type": "json_object"}}, "response_format", "`text.format`"),
        ({"stop": ["x"]}, "stop", "a body with `messages`"),
        ({"n": 2}, "n", "a body with `messages`"),
        ({"store": True}, "store", "/v1/responses"),
        ({"background": True}, "background", "/v1/responses"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "complete input"),
        ({"conversation": "conv_1"}, "conversation", "complete input"),
        ({"mind": 1}, "mind", "Unknown parameter"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": [{"role": "ghost", "content": "x"}]}, "input[0].role", "must be"),
        ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "input[0].content[0].type", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].name", "is required"),
        ({"stream": False}, "stream_options", "`stream=True`"),
    ],
)  # fmt: skip
def test_what_does_not_belong_is_refused_by_name(http: httpx.Client, fields: Any, param: str, advice: str) -> None:
    body = {"input": "hi", "stream_options": {"include_usage": True}, "stream": True}
    answer = http.post(CHAT, json=body | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert advice in error["message"]


def test_a_null_is_as_good_as_no_field(http: httpx.Client, engine: FakeEngine) -> None:
    hi = [{"role": "user", "content": "hi"}]
    for body in ({"messages": hi, "input": None}, {"messages": None, "input": hi}):
        assert http.post(CHAT, json=body).status_code == 200
        assert [message.role for message in engine.requests[-1].messages or ()] == ["user"]
    error = http.post(CHAT, json={"messages": [{"role": "ghost"}], "input": "hi"}).json()["error"]
    assert error["param"] == "messages[0].role"  # the fault of the form that was meant


def test_a_body_with_neither_is_asked_for_messages(http: httpx.Client) -> None:
    for body in ({}, {"tools": [READ]}):
        error = http.post(CHAT, json=body).json()["error"]
        assert error["param"] in ("messages", "tools[0].function")
        assert error["code"] == "missing_required_parameter"
