"""Events → bytes of a stream."""

import json
from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.api.openai.encode import ChatStream, CompletionStream
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
from .streams import choices, chunks, payloads, stream

NASTY = 'quote " slash \\ / newline \n\r\t nul \x00 del \x7f line\u2028 emoji 🦀 ü </script>'
USAGE = Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=3, reasoning_tokens=1)
END = Finished(FinishReason.STOP, USAGE)
LOGPROBS = (TokenLogprob(72, -0.5, ((72, -0.5), (65, -1.25))), TokenLogprob(200, float("-inf")))


def chat(**fields: Any) -> ChatStream:
    return ChatStream(spec(stream=True, **fields), FakeTokens())


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def chunk(delta: dict[str, Any], **choice: Any) -> str:
    """The same chunk, written by the standard library."""
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "tiny"}
    return compact({**head, "choices": choices})


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (TextDelta("Hi"), {"content": "Hi"}),
        (TextDelta(NASTY), {"content": NASTY}),
        (ReasoningDelta(NASTY), {"reasoning_content": NASTY, "reasoning": NASTY}),
        (
            ToolCallStart(1, "call_a", NASTY),
            {
                "tool_calls": [
                    {"index": 1, "id": "call_a", "type": "function", "function": {"name": NASTY, "arguments": ""}}
                ]
            },
        ),
        (ToolCallDelta(0, '{"a": "'), {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": "'}}]}),
    ],
)
def test_a_delta_is_written_as_the_standard_library_would(event: GenerationEvent, delta: dict[str, Any]) -> None:
    assert payloads(chat().feed(0, event)) == [chunk(delta)]


def test_logprobs_come_with_their_text() -> None:
    top = [{"token": "H", "logprob": -0.5, "bytes": [72]}, {"token": "A", "logprob": -1.25, "bytes": [65]}]
    content = [
        {**top[0], "top_logprobs": top},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [200], "top_logprobs": []},
    ]
    expected = chunk({"content": "H"}, logprobs={"content": content})
    assert payloads(chat(logprobs=True).feed(0, TextDelta("H", LOGPROBS))) == [expected]
    assert payloads(chat().feed(0, TextDelta("H", LOGPROBS))) == [chunk({"content": "H"})]


@row("S1-1")
def test_usage_comes_in_a_chunk_of_its_own_before_done() -> None:
    events = [(0, TextDelta("a")), (0, END)]
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
        wire = stream(encoder(include_usage=True, continuous_usage=True), ((0, event) for event in events))
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
    wire = stream(chat(reasoning="inline"), ((0, event) for event in events))
    text = "".join(part["delta"].get("content", "") for part in choices(wire, 0))
    assert text == "<think>\nhm\n</think>\n\nab" and b'"reasoning' not in wire


def completion(**fields: Any) -> CompletionStream:
    return CompletionStream(spec(reply_id="cmpl-1", stream=True, **fields), FakeTokens())


def test_completion_chunks_are_written_as_the_standard_library_would() -> None:
    def described(**choice: Any) -> str:
        whole = {"index": 1, "text": "", "logprobs": None, "finish_reason": None, **choice}
        head = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "tiny"}
        return compact({**head, "choices": [whole]})

    encoder = completion(num_prompts=2, logprobs=True)
    first = {
        "tokens": ["H", "\ufffd"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"H": -0.5, "A": -1.25}, {"\ufffd": -9999.0}],
        "text_offset": [0, 1],
    }
    later = {"tokens": ["i"], "token_logprobs": [-1.0], "top_logprobs": [{"i": -1.0}], "text_offset": [2]}
    assert encoder.open() == b""
    assert payloads(encoder.feed(1, TextDelta(NASTY))) == [described(text=NASTY)]
    assert payloads(encoder.feed(1, TextDelta("H", LOGPROBS))) == [described(text="H", logprobs=first)]
    assert payloads(encoder.feed(1, TextDelta("i", (TokenLogprob(105, -1.0),)))) == [
        described(text="i", logprobs=later)
    ]
    assert payloads(encoder.feed(1, ReasoningDelta("r"))) == [described(text="r")]
    assert payloads(encoder.feed(1, END)) == [described(finish_reason="stop", stop_reason=None)]
    assert payloads(encoder.keep_alive()) == [described(index=0)]
    assert encoder.close() == b"data: [DONE]\n\n"


@row("S0-6")
def test_a_stream_of_calls_ends_with_an_empty_delta_its_reason_and_the_usage() -> None:
    events = [(0, event) for event in THINKS_AND_CALLS]
    *_, written, counted, done = payloads(stream(chat(include_usage=True), events))
    last, usage = json.loads(written), json.loads(counted)
    [choice] = last["choices"]
    assert (choice["delta"], choice["finish_reason"]) == ({}, "tool_calls")
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 9
    assert done == "[DONE]"
