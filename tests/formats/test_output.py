"""Tokens of a reply become events, whatever the batches they come in."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.named_formats import ReplyFormats
from tests.support.rows import row
from vllm_mlx.core.events import (
    ContentEvent,
    Finished,
    FinishReason,
    GenerationEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from vllm_mlx.core.messages import Message, TextPart, ToolChoice, ToolSpec
from vllm_mlx.core.request import Request, SamplingParams
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.core.step import TokenOutput
from vllm_mlx.formats.pipeline import OutputPipeline, merged
from vllm_mlx.formats.tokenizer import Tokenizer

CHAT = Request(request_id="r", messages=(Message("user", (TextPart("hi"),)),))
TOOLS = (ToolSpec("now", None, None), ToolSpec("say", None, {"properties": {"text": {"type": "string"}}}))
WITH_TOOLS = replace(CHAT, tools=TOOLS)
CALL = '<tool_call>\n{"name": "say", "arguments": {"text": "é"}}\n</tool_call>'
CALL_EVENTS = [ToolCallStart(0, "c0", "say"), ToolCallDelta(0, '{"text": "é"}'), ToolCallEnd(0)]


class Replies:
    """Plays replies through an OutputPipeline as the engine does, `step` tokens at a time."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._prompt = PromptInputs(token_ids=tuple(self.ids("<|im_start|>assistant\n")))

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def play(
        self,
        text: str,
        request: Request = CHAT,
        *,
        step: int = 1,
        reason: FinishReason = FinishReason.STOP,
        starts_in_reasoning: bool = False,
        takes_undeclared: bool = False,
        **options: Any,
    ) -> list[GenerationEvent]:
        numbers = itertools.count()
        ids = self.ids(text)
        prompt = replace(self._prompt, starts_in_reasoning=starts_in_reasoning)
        stop_ids = frozenset(request.sampling.stop_token_ids) | self._tokenizer.eos_token_ids
        output = OutputPipeline(
            self._tokenizer,
            request,
            prompt,
            ReplyFormats("qwen3", "hermes", takes_undeclared=takes_undeclared),
            stop_token_ids=stop_ids,
            call_ids=lambda: f"c{next(numbers)}",
            **options,
        )
        events: list[ContentEvent] = []
        for batch in (ids[start : start + step] for start in range(0, len(ids), step)):
            events += output.feed([TokenOutput(0, token_id) for token_id in batch])
            if output.stopped:
                reason = FinishReason.ABORT
                break
        stop_id = ids[-1] if reason is FinishReason.STOP and ids[-1] in stop_ids else None
        *last, finished = output.finish(reason, stop_id, cached_tokens=3)
        return [*merged([*events, *last]), finished]  # type: ignore[list-item]


@pytest.fixture(params=[1, 2, 3, 1000])
def play(request: pytest.FixtureRequest, qwen: Tokenizer) -> Callable[..., list[GenerationEvent]]:
    replies = Replies(qwen)
    return lambda *args, **options: replies.play(*args, step=request.param, **options)


def texts(events: list[GenerationEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def finished(events: list[GenerationEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    assert not any(isinstance(event, Finished) for event in events[:-1])
    return events[-1]


def sampling(**options: Any) -> Request:
    return replace(CHAT, sampling=SamplingParams(**options))


@row("S3-13")
def test_whole_reply(play, qwen: Tokenizer) -> None:
    text = f"<think>\nhm 東\n</think>\n\nok{CALL}<|im_end|>"
    num_tokens = len(Replies(qwen).ids(text))
    num_thought = len(Replies(qwen).ids("\nhm 東\n"))
    *events, last = play(text, WITH_TOOLS, clamped_max_tokens=9)
    assert events == [ReasoningDelta("hm 東"), TextDelta("ok"), *CALL_EVENTS]
    usage = Usage(
        prompt_tokens=len(Replies(qwen).ids("<|im_start|>assistant\n")),
        cached_tokens=3,
        completion_tokens=num_tokens,
        reasoning_tokens=num_thought,
        clamped_max_tokens=9,
    )
    assert last == Finished(FinishReason.TOOL_CALLS, usage)


@row("S4-23")
def test_stop_token_leaves_no_text(play) -> None:
    events = play("a<|im_end|>")
    assert texts(events) == "a"
    assert finished(events).stop is None
    assert finished(events).usage.completion_tokens == 2


def test_stop_token_that_ended_nothing_is_text(play) -> None:
    request = sampling(skip_special_tokens=False)
    assert texts(play("a<|im_end|>b", request)) == "a<|im_end|>b"
    assert texts(play("a<|im_end|>", request, reason=FinishReason.LENGTH)) == "a<|im_end|>"


@row("S4-23")
def test_control_tokens_are_left_out_unless_wanted(play) -> None:
    assert texts(play("a<|endoftext|>b")) == "ab"
    assert texts(play("a<|endoftext|>b", sampling(skip_special_tokens=False))) == "a<|endoftext|>b"


@row("S0-5", "S1-1")
def test_reasoning_opened_by_the_prompt(play, qwen: Tokenizer) -> None:
    events = play("hm\n</think>\n\nok", starts_in_reasoning=True)
    assert events[:-1] == [ReasoningDelta("hm"), TextDelta("ok")]
    assert finished(events).usage.reasoning_tokens == len(Replies(qwen).ids("hm\n"))


@row("S1-1")
def test_unfinished_reasoning_counts_to_the_end(play, qwen: Tokenizer) -> None:
    events = play("hm hm", starts_in_reasoning=True, reason=FinishReason.LENGTH)
    assert finished(events).usage.reasoning_tokens == len(Replies(qwen).ids("hm hm"))


@row("S0-3")
def test_empty_reasoning_leaves_nothing(play) -> None:
    assert play("<think>\n\n</think>\n\nok")[:-1] == [TextDelta("ok")]


@pytest.mark.parametrize("stop", ["STOP", " STOP", "P", "ello S"])
def test_stop_string(play, qwen: Tokenizer, stop: str) -> None:
    text = "hello STOP world"
    events = play(text, sampling(stop=(stop, "never")))
    assert texts(events) == text[: text.index(stop)]
    assert finished(events).reason is FinishReason.STOP
    assert finished(events).stop == stop
    ids = Replies(qwen).ids(text)
    needed = next(n for n in range(len(ids) + 1) if stop in qwen.decode(ids[:n]))
    assert finished(events).usage.completion_tokens == needed


def test_stop_string_is_shown_on_request(play) -> None:
    assert texts(play("hello STOP world", sampling(stop=("STOP",), include_stop_str_in_output=True))) == "hello STOP"


def test_stop_string_that_did_not_come(play) -> None:
    events = play("hello STO", sampling(stop=("STOP",)))
    assert texts(events) == "hello STO"
    assert finished(events).stop is None


def test_stop_string_at_the_last_token_that_fits(play) -> None:
    assert finished(play("a STOP", sampling(stop=("STOP",)), reason=FinishReason.LENGTH)).reason is FinishReason.STOP


def test_stop_string_is_not_seen_before_min_tokens(play, qwen: Tokenizer) -> None:
    text = "x STOP hello STOP hello"
    num_tokens = len(Replies(qwen).ids("x STOP"))
    events = play(text, sampling(stop=("STOP",), min_tokens=num_tokens + 1))
    assert texts(events) == "x STOP hello "
    assert texts(play(text, sampling(stop=("STOP",), min_tokens=num_tokens - 3))) == "x "


def test_stop_string_may_be_a_marker(play) -> None:
    request = replace(WITH_TOOLS, sampling=SamplingParams(stop=("</tool_call>",)))
    events = play(f"ok{CALL} more", request)
    assert events[:-1] == [TextDelta("ok"), *CALL_EVENTS]
    assert finished(events).reason is FinishReason.TOOL_CALLS
    assert finished(events).stop == "</tool_call>"


def test_marker_that_begins_a_stop_string_is_still_a_marker(play) -> None:
    request = sampling(stop=("</think>END", "<think>\n\n\n"))
    assert play("<think>\nhm\n</think>\n\nok", request)[:-1] == [ReasoningDelta("hm"), TextDelta("ok")]
    assert play("<think>\nhm\n</think>END", request)[:-1] == [ReasoningDelta("hm\n")]


def test_stop_string_spans_control_tokens(play) -> None:
    events = play("a<|endoftext|>b c", sampling(stop=("|>b",)))
    assert texts(events) == "a<|endoftext"


def test_client_stop_token(play, qwen: Tokenizer) -> None:
    token_id = qwen.token_id("<|endoftext|>")
    assert token_id is not None
    events = play("a<|endoftext|>", sampling(stop_token_ids=(token_id,)))
    assert texts(events) == "a"
    assert finished(events).stop == token_id


def test_stop_token_that_closes_a_call(play, qwen: Tokenizer) -> None:
    token_id = qwen.token_id("</tool_call>")
    assert token_id is not None
    request = replace(WITH_TOOLS, sampling=SamplingParams(stop_token_ids=(token_id,)))
    events = play('<tool_call>{"name": "say", "arguments": {"text": "é"}</tool_call>', request)
    assert events[:-1] == CALL_EVENTS
    assert finished(events).reason is FinishReason.TOOL_CALLS


def test_call_cut_at_max_tokens(play) -> None:
    events = play('<tool_call>{"name": "say", "arguments": {"text": "a b', WITH_TOOLS, reason=FinishReason.LENGTH)
    assert events[:-1] == [ToolCallStart(0, "c0", "say"), ToolCallDelta(0, '{"text": "a b')]
    assert finished(events).reason is FinishReason.LENGTH


def test_a_call_in_which_the_model_ends_its_turn_is_broken(play) -> None:
    text = '{"name": "say", "arguments": {"text": "a b'
    events = play(f"<tool_call>{text}<|im_end|>", WITH_TOOLS)
    closed = [ToolCallDelta(0, '{"text": "a b"}'), ToolCallEnd(0, is_broken=True)]
    assert events[:-1] == [ToolCallStart(0, "c0", "say"), *closed, TextDelta(text)]
    assert finished(events).reason is FinishReason.STOP
    assert finished(events).broken_calls == ("c0",)


def test_a_call_whose_arguments_are_whole_needs_no_end(play) -> None:
    events = play('<tool_call>{"name": "say", "arguments": {"text": "a b"}<|im_end|>', WITH_TOOLS)
    assert events[:-1] == [ToolCallStart(0, "c0", "say"), ToolCallDelta(0, '{"text": "a b"}'), ToolCallEnd(0)]
    assert finished(events).reason is FinishReason.TOOL_CALLS


def test_a_reply_whose_open_call_was_completed_is_not_complete(qwen: Tokenizer) -> None:
    """No client sends it back as the model wrote it."""
    for text, is_complete in ((CALL, True), (CALL.partition("}}")[0] + "}", False)):
        *ids, end = Replies(qwen).ids(f"{text}<|im_end|>")
        formats, prompt = ReplyFormats("qwen3", "hermes"), PromptInputs(token_ids=(1,))
        output = OutputPipeline(qwen, WITH_TOOLS, prompt, formats, stop_token_ids=frozenset({end}))
        output.feed([TokenOutput(0, token_id) for token_id in (*ids, end)])
        output.finish(FinishReason.STOP, end)
        assert len(output.reply.calls) == 1 and output.reply.is_complete is is_complete


def test_a_reply_with_a_call_that_cannot_be_read_is_no_reply_of_calls(play) -> None:
    broken = '{"name": "say", "arguments": {"text": bad}}'
    events = play(f"{CALL}<tool_call>{broken}</tool_call>", WITH_TOOLS)
    assert [event.is_broken for event in events if isinstance(event, ToolCallEnd)] == [False, True]
    assert texts(events) == broken
    assert finished(events).reason is FinishReason.STOP
    assert finished(events).broken_calls == ("c1",)


def test_an_undeclared_call_is_a_call_if_the_server_says_so(play) -> None:
    called = play(CALL.replace("say", "cry"), WITH_TOOLS, takes_undeclared=True)
    assert called[0] == ToolCallStart(0, "c0", "cry") and finished(called).reason is FinishReason.TOOL_CALLS
    shown = play(CALL.replace("say", "cry"), WITH_TOOLS)
    assert isinstance(shown[0], TextDelta) and finished(shown).reason is FinishReason.STOP


def test_length_wins_over_tool_calls(play) -> None:
    events = play(f"{CALL}\nand", WITH_TOOLS, reason=FinishReason.LENGTH)
    assert events[:-1] == [*CALL_EVENTS, TextDelta("\nand")]
    assert finished(events).reason is FinishReason.LENGTH


def test_abort_stays_an_abort(play) -> None:
    assert finished(play("a", reason=FinishReason.ABORT)).reason is FinishReason.ABORT


def test_reply_ends_after_its_last_allowed_call(play, qwen: Tokenizer) -> None:
    events = play(f"{CALL}\n{CALL}<|im_end|>", replace(WITH_TOOLS, max_tool_calls=1))
    assert events[:-1] == CALL_EVENTS
    assert finished(events).reason is FinishReason.TOOL_CALLS
    num_tokens = len(Replies(qwen).ids(CALL.removesuffix("\n</tool_call>")))
    assert finished(events).usage.completion_tokens == num_tokens


@pytest.mark.parametrize("request_", [CHAT, replace(WITH_TOOLS, tool_choice=ToolChoice("none"))])
def test_without_tools_a_call_is_text(play, request_: Request) -> None:
    name, arguments = json.loads(texts(play(CALL, request_))).values()
    assert (name, arguments) == ("say", {"text": "é"})


@pytest.mark.parametrize("request_", [CHAT, replace(WITH_TOOLS, tool_choice=ToolChoice("none"))])
def test_without_tools_no_name_makes_a_call(play, request_: Request) -> None:
    assert json.loads(texts(play(CALL, request_, takes_undeclared=True)))["name"] == "say"


def test_undeclared_tool_is_text(play) -> None:
    events = play(CALL.replace("say", "rm"), WITH_TOOLS)
    assert events[:-1] == [TextDelta('{"name": "rm", "arguments": {"text": "é"}}')]
    assert finished(events).reason is FinishReason.STOP


def test_plain_completion_is_all_text(play) -> None:
    completion = Request(request_id="r", prompt="hi")
    assert texts(play(f"<think>a</think>{CALL}", completion)) == f"<think>a</think>{CALL}"


@row("S3-20")
def test_a_reply_without_text_and_calls_ends_at_the_limit(play) -> None:
    events = play("so many words", starts_in_reasoning=True, max_silent_tokens=2, reason=FinishReason.LENGTH)
    assert finished(events).reason is FinishReason.LENGTH
    assert finished(events).usage.completion_tokens == finished(events).usage.reasoning_tokens == 2
    [reasoning] = events[:-1]
    assert isinstance(reasoning, ReasoningDelta) and "so many words".startswith(reasoning.text)


@row("S3-20")
def test_white_space_is_no_text(play) -> None:
    assert (
        finished(play("</think>" + "\n " * 9, starts_in_reasoning=True, max_silent_tokens=4)).usage.completion_tokens
        == 4
    )


@row("S3-20")
@pytest.mark.parametrize("text", ["hm</think>ok, and " + "on and " * 9, f"hm</think>{CALL}"])
def test_what_begins_before_the_limit_goes_on(play, qwen: Tokenizer, text: str) -> None:
    num_before = len(Replies(qwen).ids(text[: text.index("ok" if "ok" in text else '"arguments"') + 2]))
    limited = play(text, WITH_TOOLS, starts_in_reasoning=True, max_silent_tokens=num_before + 1)
    assert limited == play(text, WITH_TOOLS, starts_in_reasoning=True)


def test_echo_comes_first(play, qwen: Tokenizer) -> None:
    assert texts(play(" world", Request(request_id="r", prompt="hello", echo=True))) == "hello world"
    by_ids = Request(request_id="r", prompt=tuple(Replies(qwen).ids("x")), echo=True)
    assert texts(play(" world", by_ids)) == "assistant\n world"


def test_held_text_comes_out_at_the_end(play, qwen: Tokenizer) -> None:
    assert texts(play("a <tool", WITH_TOOLS)) == "a <tool"
    byte = next(i for i in range(qwen.vocab_size) if qwen.token_bytes(i) == b"\xe6")
    output = OutputPipeline(qwen, CHAT, PromptInputs(token_ids=(1,)), ReplyFormats("qwen3"))
    assert output.feed([TokenOutput(0, byte)]) == []
    assert texts(output.finish(FinishReason.LENGTH)) == "\ufffd"


def test_tokens_after_the_stop_are_ignored(qwen: Tokenizer) -> None:
    output = OutputPipeline(qwen, sampling(stop=("a",)), PromptInputs(token_ids=(1,)), ReplyFormats())
    a = Replies(qwen).ids("a")
    assert output.feed([TokenOutput(0, a[0])] * 3) == []
    assert output.stopped
    assert output.feed([TokenOutput(0, a[0])]) == []
    last = output.finish(FinishReason.ABORT)
    assert [type(event) for event in last] == [Finished]
    assert finished(last).usage.completion_tokens == 1
    assert finished(last).stop == "a"


def test_tokens_without_text_count(qwen: Tokenizer) -> None:
    output = OutputPipeline(qwen, CHAT, PromptInputs(token_ids=(1,)), ReplyFormats())
    output.feed([TokenOutput(0, 10**6), TokenOutput(0, 10**6)])
    assert finished(output.finish(FinishReason.LENGTH)).usage.completion_tokens == 2


def filled(tokenizer: Tokenizer, text: str, reasoning: str, *, starts: bool = False, fills: bool | None = None) -> Any:
    """(reasoning, content) of a reply."""
    prompt = PromptInputs(token_ids=(1,), starts_in_reasoning=starts)
    request = replace(WITH_TOOLS, fills_content=fills)
    output = OutputPipeline(tokenizer, request, prompt, ReplyFormats(reasoning, "hermes"))
    events: list[Any] = [
        *output.feed([TokenOutput(0, token_id) for token_id in Replies(tokenizer).ids(text)]),
        *output.finish(FinishReason.STOP),
    ]
    shown = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert "".join(part.text for part in output.reply.message.parts if isinstance(part, TextPart)) == shown
    return "".join(event.text for event in events if isinstance(event, ReasoningDelta)), shown


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("<think>hm", {"fills": True}, ("hm", "hm")),
        ("<think>hm</think>\n", {"fills": True}, ("hm", "hm")),
        ("hm", {"fills": True, "starts": True}, ("hm", "hm")),
        ("<think>hm</think>Hi", {"fills": True}, ("hm", "Hi")),
        (f"<think>hm</think>{CALL}", {"fills": True}, ("hm", "")),
        ("<think>hm", {}, ("hm", "")),
        ("<think>hm", {"reasoning": "nemotron_v3"}, ("hm", "hm")),
        ("<think>hm", {"reasoning": "nemotron_v3", "fills": False}, ("hm", "")),
        ("hm", {"reasoning": "nemotron_v3", "starts": True}, ("hm", "")),
        ("Hi", {"reasoning": "nemotron_v3"}, ("", "Hi")),
    ],
)
def test_reasoning_alone_is_content_where_content_must_not_be_empty(
    qwen: Tokenizer, text: str, options: Any, expected: tuple[str, str]
) -> None:
    """Nemotron does so unless its prompt opened the reasoning, which means that reasoning is on."""
    assert filled(qwen, text, **{"reasoning": "qwen3", **options}) == expected
