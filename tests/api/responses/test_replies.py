"""Events → wire bytes, streamed and whole."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from vllm_mlx.api.error_replies import response_code
from vllm_mlx.api.responses.encode import ResponseStream
from vllm_mlx.api.responses.replies import Tools
from vllm_mlx.api.search import SEARCH_NAME, SearchTool
from vllm_mlx.api.text import Unsealer
from vllm_mlx.core.errors import Cancelled, ContextLengthExceeded, GenerationError, GrammarLimit, Overloaded
from vllm_mlx.core.events import (
    FinishReason,
    GenerationEvent,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

from ..events import THINKS_AND_CALLS, cut_anywhere, finished, replies
from ..streams import named_events
from .bodies import folded, spec, streamed

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
EVERYTHING: Any = {
    "tools": Tools(namespaces={"multi__wait": ("multi", "wait")}),
    "shows_summary": True,
    "seals_reasoning": True,
    "echo": {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
}


def vendor_takes(sent: list[Any]) -> None:
    """Have the vendor's own package read the events, which raises where it cannot."""
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    for data in sent:
        state.handle_event(EVENT.validate_python(data))


@given(st.data(), replies())
def test_a_streamed_response_is_the_folded_one(data: Any, events: list[GenerationEvent]) -> None:
    """The response of the last event, and what the deltas of each item add up to."""
    whole = folded(events, **EVERYTHING)
    sent = named_events(streamed(data.draw(cut_anywhere(events)), **EVERYTHING))
    assert sent[-1]["response"] == whole
    ended = [item for item in whole["output"] if (item["type"], item["status"]) != ("function_call", "incomplete")]
    assert [event["item"] for event in sent if event["type"] == "response.output_item.done"] == ended
    for index, item in enumerate(whole["output"]):
        deltas = [event for event in sent if event["type"].endswith(".delta") and event["output_index"] == index]
        text = "".join(event["delta"] for event in deltas if "summary" not in event["type"])
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@settings(deadline=None, max_examples=30)  # the package builds its types at first
@given(replies())
def test_the_vendor_s_package_takes_the_stream(events: list[GenerationEvent]) -> None:
    vendor_takes(named_events(streamed(events, **EVERYTHING)))


PATCHES: Any = {**EVERYTHING, "tools": Tools(custom=frozenset({"apply_patch"}))}


def patching(*arguments: str) -> list[GenerationEvent]:
    start = ToolCallStart(0, "call_1", "apply_patch")
    return [start, *(ToolCallDelta(0, part) for part in arguments), ToolCallEnd(0), finished(FinishReason.TOOL_CALLS)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (('{"input": "*** Begin\\n', 'ü \\"x\\""}'), '*** Begin\nü "x"'),
        (('{"input": ""}',), ""),
        (('{"patch": 5}',), '{"patch": 5}'),
        (("{}",), "{}"),
    ],
)
def test_a_custom_call_is_its_text(arguments: tuple[str, ...], text: str) -> None:
    whole = folded(patching(*arguments), **PATCHES)
    [item] = whole["output"]
    assert (item["type"], item["name"], item["call_id"]) == ("custom_tool_call", "apply_patch", "call_1")
    assert item["input"] == text
    sent = named_events(streamed(patching(*arguments), **PATCHES))
    assert sent[-1]["response"] == whole
    assert [event["type"].removeprefix("response.") for event in sent[2:-1]] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert (sent[2]["item"]["input"], sent[3]["delta"], sent[4]["input"], sent[5]["item"]) == ("", text, text, item)
    vendor_takes(sent)


@pytest.mark.parametrize("fields", [EVERYTHING, PATCHES])
@pytest.mark.parametrize("end", ["limit", "failure", "broken"])
def test_a_call_that_was_cut_does_not_end(fields: Any, end: str) -> None:
    """Codex runs each call whose item is done, whatever the item's status."""
    start, part, closed, _ = patching('{"input": "*** Be')
    rest: dict[str, list[GenerationEvent]] = {
        "limit": [finished(FinishReason.LENGTH)],
        "failure": [],
        "broken": [ToolCallDelta(0, '"}'), replace(closed, is_broken=True), TextDelta("so"), finished()],
    }
    stream = ResponseStream(spec(stream=True, **fields))
    wire = stream.open() + b"".join([stream.feed(0, event) for event in (start, part, *rest[end])])
    sent = named_events(wire + (stream.close() if rest[end] else stream.fail(Cancelled())))
    statuses = [item["status"] for item in sent[-1]["response"]["output"]]
    assert statuses == (["incomplete", "completed"] if end == "broken" else ["incomplete"])
    assert {event["output_index"] for event in sent if event["type"].endswith(".done")} == set(range(1, len(statuses)))
    vendor_takes(sent)


def test_a_complete_response_shows_a_search_that_cannot_be_read_as_its_text() -> None:
    start, part, closed, _ = patching("{}")
    assert isinstance(start, ToolCallStart)
    events = (replace(start, name=SEARCH_NAME), part, replace(closed, is_broken=True), TextDelta("so"), finished())
    [item] = folded(events, tools=Tools(search=SearchTool()), search=SearchTool())["output"]
    assert item["content"][0]["text"] == "so"


def test_reasoning_is_packed_into_the_item_where_the_client_asks_for_it() -> None:
    reasoning, *_ = folded(THINKS_AND_CALLS, **EVERYTHING)["output"]
    assert Unsealer().unseal(reasoning["encrypted_content"], "a") == "Need files.\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GenerationError("x"), "server_error"),
        (GrammarLimit("x", param="text.format"), "invalid_prompt"),
        (Overloaded("x", retry_after_s=1), "rate_limit_exceeded"),
        (ContextLengthExceeded(num_prompt_tokens=9, max_model_len=8), "context_length_exceeded"),
    ],
)
def test_codes_of_failures(error: Any, code: str) -> None:
    assert response_code(error) == code
