"""Events → bytes of a stream."""

import json
from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.api.openai.encode import DONE, ChatStream, CompletionStream
from vllm_mlx.core.errors import EngineDead
from vllm_mlx.core.events import (
    Counted,
    Finished,
    FinishReason,
    GenerationEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)

from .bodies import spec
from .events import THINKS_AND_CALLS
from .fakes import FakeTokens
from .streams import alone, choices, chunks, payloads, stream

USAGE = Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=3, reasoning_tokens=1)
END = Finished(FinishReason.STOP, USAGE)
LOGPROBS = (TokenLogprob(72, -0.5, ((72, -0.5), (65, -1.25))), TokenLogprob(200, float("-inf")))


def chat(**fields: Any) -> ChatStream:
    return ChatStream(spec(stream=True, **fields), FakeTokens())


def completion(**fields: Any) -> CompletionStream:
    return CompletionStream(spec(reply_id="cmpl-1", stream=True, **fields), FakeTokens())


def test_logprobs_come_with_their_text_if_they_were_asked_for() -> None:
    top = [{"token": "H", "logprob": -0.5, "bytes": [72]}, {"token": "A", "logprob": -1.25, "bytes": [65]}]
    split = {"token": "\ufffd", "logprob": -9999.0, "bytes": [200], "top_logprobs": []}
    for fields, expected in (({"logprobs": True}, {"content": [{**top[0], "top_logprobs": top}, split]}), ({}, None)):
        [choice] = choices(chat(**fields).feed(0, TextDelta("H", LOGPROBS)) + DONE, 0)
        assert (choice["delta"], choice["logprobs"]) == ({"content": "H"}, expected)


@row("S1-1")
def test_usage_comes_in_a_chunk_of_its_own_before_done() -> None:
    events = alone([TextDelta("a"), END])
    *others, last = chunks(stream(chat(include_usage=True), events))
    assert [each["usage"] for each in others] == [None, None, None]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert not any("usage" in each for each in chunks(stream(chat(), events)))


@pytest.mark.parametrize("text", ["a", '"usage":null}\n\n', "data: \n\n"])
def test_counts_so_far_are_part_of_each_chunk(text: str) -> None:
    one, two = (Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=count) for count in (1, 2))
    call: list[GenerationEvent] = [ToolCallStart(0, "c", "f"), ToolCallEnd(0), END]
    events = [Started(7, 2), Counted(one), TextDelta(text), Counted(two), ReasoningDelta("b"), *call]
    for encoder in (chat, completion):
        wire = stream(encoder(include_usage=True, continuous_usage=True), alone(events))
        *others, finish, last = chunks(wire)
        counts = [each["usage"]["completion_tokens"] for each in others]
        assert counts == ([0, 1, 2, 2, 2] if encoder is chat else [1, 2])
        assert finish["usage"] == last["usage"] and finish["usage"]["completion_tokens"] == 3
        assert json.dumps(text) in wire.decode(), "the text stays"


@pytest.mark.parametrize("custom_tools", [frozenset(), frozenset({"ls"})])
def test_a_failure_inside_a_call_is_not_followed_by_a_finish_reason(custom_tools: frozenset[str]) -> None:
    encoder = chat(custom_tools=custom_tools)
    wire = b"".join(encoder.feed(0, event) for event in (ToolCallStart(0, "call_1", "ls"), ToolCallDelta(0, '{"a')))
    *sent, failed = chunks(wire + encoder.fail(EngineDead("Gone.")))
    assert "error" in failed and sent
    assert all(choice["finish_reason"] is None for chunk in sent for choice in chunk["choices"])


@row("S0-17")
def test_inline_reasoning_comes_between_tags() -> None:
    events: list[GenerationEvent] = [ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("a"), TextDelta("b"), END]
    wire = stream(chat(reasoning="inline"), alone(events))
    text = "".join(part["delta"].get("content", "") for part in choices(wire, 0))
    assert text == "<think>\nhm\n</think>\n\nab" and b'"reasoning' not in wire


@row("S0-6")
def test_a_stream_of_calls_ends_with_an_empty_delta_its_reason_and_the_usage() -> None:
    *_, written, counted, done = payloads(stream(chat(include_usage=True), alone(THINKS_AND_CALLS)))
    last, usage = json.loads(written), json.loads(counted)
    [choice] = last["choices"]
    assert (choice["delta"], choice["finish_reason"]) == ({}, "tool_calls")
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 9
    assert done == "[DONE]"
