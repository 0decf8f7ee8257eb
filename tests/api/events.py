"""Events of whole replies, and of any reply cut anywhere."""

from hypothesis import strategies as st

from vllm_mlx.core.events import (
    Finished,
    FinishReason,
    GenerationEvent,
    PromptProgress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)

USAGE = Usage(prompt_tokens=20, cached_tokens=12, completion_tokens=9, reasoning_tokens=4)


def finished(reason: FinishReason = FinishReason.STOP, stop: str | int | None = None) -> Finished:
    return Finished(reason, USAGE, stop)


THINKS_AND_CALLS: list[GenerationEvent] = [
    Started(20, 12),
    PromptProgress(16, 20),
    ReasoningDelta("Need "),
    ReasoningDelta("files.\n"),
    TextDelta('Look "here" ü\n'),
    ToolCallStart(0, "call_1a", "ls"),
    ToolCallDelta(0, '{"path":'),
    ToolCallDelta(0, ' "/"}'),
    ToolCallEnd(0),
    ToolCallStart(1, "call_1b", "multi__wait"),
    ToolCallEnd(1),
    finished(FinishReason.TOOL_CALLS),
]

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
words = st.one_of(st.builds(TextDelta, texts), st.builds(ReasoningDelta, texts), st.just(PromptProgress(1, 2)))


@st.composite
def replies(draw: st.DrawFn) -> list[GenerationEvent]:
    """Reasoning, text and calls in any order, some calls without their end, then an end."""
    events: list[GenerationEvent] = [Started(20, 12)]
    for number in range(draw(st.integers(0, 3))):
        events += draw(st.lists(words, max_size=4))
        if draw(st.booleans()):
            events.append(ToolCallStart(number, f"call_{number}", draw(texts)))
            events += [ToolCallDelta(number, part) for part in draw(cut_json())]
            if draw(st.booleans()):
                events.append(ToolCallEnd(number))
    return [*events, finished(draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])))]


@st.composite
def cut_json(draw: st.DrawFn) -> list[str]:
    text = draw(st.sampled_from(['{"a":1}', "{}", '{"path":"/ü","deep":{"x":[1,2]}}', ""]))
    at = draw(st.integers(0, len(text)))
    return [part for part in (text[:at], text[at:]) if part]


@st.composite
def cut_anywhere(draw: st.DrawFn, events: list[GenerationEvent]) -> list[GenerationEvent]:
    """The same reply, its deltas cut at other places."""
    result: list[GenerationEvent] = []
    for event in events:
        match event:
            case TextDelta(text):
                at = draw(st.integers(0, len(text)))
                result += [TextDelta(part) for part in (text[:at], text[at:])]
            case ReasoningDelta(text):
                at = draw(st.integers(0, len(text)))
                result += [ReasoningDelta(part) for part in (text[:at], text[at:])]
            case ToolCallDelta(index, text):
                at = draw(st.integers(0, len(text)))
                result += [ToolCallDelta(index, part) for part in (text[:at], text[at:])]
            case _:
                result.append(event)
    return result
