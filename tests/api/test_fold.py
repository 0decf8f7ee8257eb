"""The whole reply, and that a stream of the same events says the same, however the events were cut."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from tests.support.rows import row
from vllm_mlx.api.openai.encode import ChatStream, CompletionStream, chat_fold, completion_fold
from vllm_mlx.core.events import (
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
from .fakes import FakeTokens
from .streams import Events, alone, choices, chunks, fold, folded_choice, stream

USAGE = Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=3, reasoning_tokens=1)


def folded(events: Events, **fields: Any) -> dict[str, Any]:
    reply: dict[str, Any] = fold(chat_fold(spec(**fields), FakeTokens()), events)
    return reply


def one(*events: GenerationEvent, reason: FinishReason = FinishReason.STOP, **fields: Any) -> dict[str, Any]:
    [choice] = folded(alone((*events, Finished(reason, USAGE))), **fields)["choices"]
    return choice


@row("S0-2")
def test_a_whole_reply() -> None:
    events = [
        Started(7, 2),
        ReasoningDelta("why"),
        TextDelta("Hi"),
        TextDelta("!"),
        Finished(FinishReason.STOP, USAGE, "X"),
    ]
    assert folded(alone(events)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 5,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hi!",
                    "refusal": None,
                    "reasoning_content": "why",
                    "reasoning": "why",
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "X",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
    }


CALL = (ToolCallStart(0, "call_1", "ls"), ToolCallDelta(0, '{"p":'), ToolCallDelta(0, "1}"), ToolCallEnd(0))


def test_a_prompt_of_several_choices_counts_once_as_the_choice_that_computed_most_of_it() -> None:
    usages = [Usage(prompt_tokens=7, cached_tokens=cached, completion_tokens=1) for cached in (6, 2, 6)]
    ends = [(index, Finished(FinishReason.STOP, usage)) for index, usage in enumerate(usages)]
    usage = folded(ends, choices_per_prompt=3)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (7, 2)


@row("S0-17")
@pytest.mark.parametrize("after", [(), (TextDelta("Hi"),), CALL])
def test_inline_reasoning_is_closed_by_whatever_follows(after: tuple[GenerationEvent, ...]) -> None:
    content = one(ReasoningDelta("why"), *after, reasoning="inline")["message"]["content"]
    assert content.startswith("<think>\nwhy\n</think>\n\n")


# Streamed = folded

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
logprobs = st.lists(st.builds(TokenLogprob, st.integers(32, 255), st.floats(-20, 0)), max_size=2).map(tuple)
words = st.one_of(
    st.builds(TextDelta, texts, logprobs),
    st.builds(ReasoningDelta, texts),
    st.just(PromptProgress(1, 2)),
)


@st.composite
def replies(draw: st.DrawFn) -> list[GenerationEvent]:
    """Reasoning and text in any order, then calls, then an end."""
    events: list[GenerationEvent] = [Started(7, 2), *draw(st.lists(words, max_size=6))]
    for index in range(draw(st.integers(0, 3))):
        events.append(ToolCallStart(index, f"call_{index}", draw(texts)))
        events.extend(ToolCallDelta(index, part) for part in draw(st.lists(texts, max_size=3)))
        events.append(ToolCallEnd(index))
    return [*events, Finished(draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])), USAGE)]


@st.composite
def interleaved(draw: st.DrawFn) -> list[tuple[int, GenerationEvent]]:
    """The events of three choices, in order within each."""
    waiting = [draw(replies()) for _ in range(3)]
    events = []
    while any(waiting):
        index = draw(st.sampled_from([index for index, rest in enumerate(waiting) if rest]))
        events.append((index, waiting[index].pop(0)))
    return events


@settings(max_examples=examples(40))
@given(interleaved(), st.booleans(), st.sampled_from(["separate", "inline", "hidden"]))
def test_a_streamed_chat_is_the_folded_chat(
    events: list[tuple[int, GenerationEvent]], with_logprobs: bool, reasoning: Any
) -> None:
    fields = {"choices_per_prompt": 3, "logprobs": with_logprobs, "reasoning": reasoning}
    whole = folded(events, **fields)
    wire = stream(ChatStream(spec(include_usage=True, stream=True, **fields), FakeTokens()), events)
    for index, choice in enumerate(whole["choices"]):
        if choice["logprobs"] == {"content": []}:  # a stream that had none to send sent null
            choice["logprobs"] = None
        assert folded_choice(wire, index) == choice
    assert chunks(wire)[-1]["usage"] == whole["usage"]


@settings(max_examples=examples(40))
@given(interleaved(), st.booleans())
def test_a_streamed_completion_is_the_folded_completion(
    events: list[tuple[int, GenerationEvent]], with_logprobs: bool
) -> None:
    described = spec(num_prompts=3, logprobs=with_logprobs)
    wire = stream(CompletionStream(described, FakeTokens()), events)
    for choice in fold(completion_fold(described, FakeTokens()), events)["choices"]:
        parts = choices(wire, choice["index"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if with_logprobs:
            for name, values in choice["logprobs"].items():
                assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values


@given(texts, texts, st.integers(0, 8), st.booleans())
def test_where_text_was_cut_does_not_matter(reasoning: str, text: str, at: int, inline: bool) -> None:
    mode = "inline" if inline else "separate"
    cut = one(
        ReasoningDelta(reasoning[:at]),
        ReasoningDelta(reasoning[at:]),
        TextDelta(text[:at]),
        TextDelta(text[at:]),
        reasoning=mode,
    )
    assert cut == one(ReasoningDelta(reasoning), TextDelta(text), reasoning=mode)
