"""Events → bytes of a stream."""

import json
from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.api.openai.encode import ChatStream, CompletionStream
from vllm_mlx.core.errors import EngineDead, InvalidParameter, Overloaded
from vllm_mlx.core.events import (
    Counted,
    Finished,
    FinishReason,
    GenerationEvent,
    PromptProgress,
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


def test_the_first_and_the_last_chunk() -> None:
    assert payloads(chat().open()) == [chunk({"role": "assistant", "content": ""})]
    assert payloads(chat().feed(0, END)) == [chunk({}, finish_reason="stop", stop_reason=None)]
    assert payloads(chat().close()) == ["[DONE]"]


def test_the_stop_that_ended_the_reply_is_named() -> None:
    assert payloads(chat().feed(0, Finished(FinishReason.STOP, USAGE, NASTY))) == [
        chunk({}, finish_reason="stop", stop_reason=NASTY)
    ]
    [part] = payloads(chat().feed(0, Finished(FinishReason.LENGTH, USAGE, 13)))
    assert json.loads(part)["choices"][0] | {"delta": None} == {
        "index": 0,
        "delta": None,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": 13,
    }


def test_logprobs_come_with_their_text() -> None:
    top = [{"token": "H", "logprob": -0.5, "bytes": [72]}, {"token": "A", "logprob": -1.25, "bytes": [65]}]
    content = [
        {**top[0], "top_logprobs": top},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [200], "top_logprobs": []},
    ]
    expected = chunk({"content": "H"}, logprobs={"content": content})
    assert payloads(chat(logprobs=True).feed(0, TextDelta("H", LOGPROBS))) == [expected]
    assert payloads(chat().feed(0, TextDelta("H", LOGPROBS))) == [chunk({"content": "H"})]


def test_events_without_news_for_the_client_send_nothing() -> None:
    encoder = chat()
    for event in (Started(7, 2), PromptProgress(3, 7), TextDelta("")):
        assert encoder.feed(0, event) == b""


def test_a_call_without_arguments_still_carries_an_object() -> None:
    encoder = chat()
    events = [
        ToolCallStart(0, "a", "now"),
        ToolCallEnd(0),
        ToolCallStart(1, "b", "ls"),
        ToolCallDelta(1, "{}"),
        ToolCallEnd(1),
    ]
    deltas = [
        part["delta"]["tool_calls"][0] for part in choices(stream(encoder, ((0, event) for event in events)), 0)[1:]
    ]
    assert [(delta["index"], delta["function"]["arguments"]) for delta in deltas] == [
        (0, ""),
        (0, "{}"),
        (1, ""),
        (1, "{}"),
    ]


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


def test_usage_says_where_the_context_cut_max_tokens() -> None:
    cut = Usage(prompt_tokens=7, completion_tokens=3, clamped_max_tokens=3)
    *_, last = chunks(stream(chat(include_usage=True), [(0, Finished(FinishReason.LENGTH, cut))]))
    assert last["usage"]["max_completion_tokens"] == 3


def test_several_choices_count_their_prompt_once_and_interleave() -> None:
    cold, warm = (
        Usage(prompt_tokens=7, completion_tokens=3),
        Usage(prompt_tokens=7, cached_tokens=6, completion_tokens=4),
    )
    events: list[tuple[int, GenerationEvent]] = [
        (1, TextDelta("b")),
        (0, TextDelta("a")),
        (1, Finished(FinishReason.STOP, warm)),
        (0, Finished(FinishReason.LENGTH, cold)),
    ]
    wire = stream(chat(choices_per_prompt=2, include_usage=True), events)
    assert [part["delta"].get("role") for index in (0, 1) for part in choices(wire, index)[:1]] == ["assistant"] * 2
    assert [part["finish_reason"] for index in (0, 1) for part in choices(wire, index)] == [
        None,
        None,
        "length",
        None,
        None,
        "stop",
    ]
    usage = chunks(wire)[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 7, 14)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_keep_alive_is_a_chunk_with_an_empty_delta() -> None:
    assert payloads(chat().keep_alive()) == [chunk({})]


@pytest.mark.parametrize(
    "error", [EngineDead("Gone."), Overloaded("Full.", retry_after_s=2), InvalidParameter("No.", param="n")]
)
def test_a_failure_ends_the_stream_with_an_error_and_done(error: Any) -> None:
    failed, done = payloads(chat().fail(error))
    assert done == "[DONE]"
    body = json.loads(failed)["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["message"] == error.message


@pytest.mark.parametrize("custom_tools", [frozenset(), frozenset({"ls"})])
def test_a_failure_inside_a_call_is_not_followed_by_a_finish_reason(custom_tools: frozenset[str]) -> None:
    encoder = chat(custom_tools=custom_tools)
    wire = b"".join(encoder.feed(0, event) for event in (ToolCallStart(0, "call_1", "ls"), ToolCallDelta(0, '{"a')))
    *sent, failed = chunks(wire + encoder.fail(EngineDead("Gone.")))
    assert "error" in failed and sent
    assert all(choice["finish_reason"] is None for chunk in sent for choice in chunk["choices"])


def test_hidden_reasoning_is_not_sent() -> None:
    events: list[GenerationEvent] = [ReasoningDelta("hmm"), TextDelta("a"), END]
    wire = stream(chat(reasoning="hidden"), ((0, event) for event in events))
    assert b"hmm" not in wire and b"reasoning" not in wire


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


def test_prompts_of_one_completion_are_counted_each() -> None:
    events = [(index, Finished(FinishReason.STOP, USAGE)) for index in range(4)]
    wire = stream(completion(num_prompts=2, choices_per_prompt=2, include_usage=True), events)
    usage = chunks(wire)[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (14, 12)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


@row("S0-6")
def test_a_stream_of_calls_ends_with_an_empty_delta_its_reason_and_the_usage() -> None:
    events = [(0, event) for event in THINKS_AND_CALLS]
    *_, written, counted, done = payloads(stream(chat(include_usage=True), events))
    last, usage = json.loads(written), json.loads(counted)
    [choice] = last["choices"]
    assert (choice["delta"], choice["finish_reason"]) == ({}, "tool_calls")
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 9
    assert done == "[DONE]"
