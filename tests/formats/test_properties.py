"""Whatever a model writes: no error, nothing lost, no effect of the cuts."""

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from vllm_mlx.core.events import ContentEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

from .support import MARKERS, TOOLS, Piece, as_special, run

# Letters that are in no tag, no key and no tool name: each must come out again.
PAYLOAD = "qvxzQVXZ東🙂"
FRAGMENTS = [
    *MARKERS,
    "<think", "</think", "<tool_", "</tool_call", "<", ">", "\n", "\n\n", " ", "\\", "\\u00", "{", "}", "[", "]",
    '{"name": "now", "arguments": {', '{"name": "write", "arguments": {"text": "', '"}}', "}}", '"arguments": {"a": [',
    '{"name": "rm", "arguments": {"a": "', "<function=now>", "<function=write>", "<function=rm>", "</function>",
    "<parameter=text>", "<parameter=tags>\n", "<parameter=n>", "</parameter>", "\n</parameter>\n", "1", "-2.5", "true",
    "null", *PAYLOAD,
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
anything = st.one_of(texts, st.text())
names = st.tuples(st.sampled_from([None, "qwen3", "deepseek_r1"]), st.sampled_from([None, "hermes"]))
MODES = st.sampled_from([frozenset[str](), frozenset(MARKERS), frozenset(MARKERS[2:])])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def cut_pieces(pieces: list[Piece], places: list[int]) -> list[Piece]:
    return [(part, special) for text, special in pieces for part in ([text] if special else cut(text, places))]


@settings(max_examples=examples(150), deadline=None)
@given(anything, st.lists(st.integers(0, 400), max_size=6), names, st.booleans(), st.booleans())
def test_cuts_do_not_matter(text: str, places: list[int], names, starts_in_reasoning: bool, declared: bool) -> None:
    options = {
        "reasoning": names[0],
        "tools": names[1],
        "starts_in_reasoning": starts_in_reasoning,
        "tool_specs": TOOLS if declared else (),
    }
    whole = run([text], **options)
    assert run(cut(text, places), **options) == whole
    assert run(list(text), **options) == whole


@settings(max_examples=examples(150), deadline=None)
@given(anything, st.lists(st.integers(0, 400), max_size=6), MODES, st.booleans())
def test_cuts_between_special_pieces_do_not_matter(text: str, places: list[int], tokens, declared: bool) -> None:
    pieces = as_special(text, tokens)
    options = {"marker_tokens": tokens, "tool_specs": TOOLS if declared else ()}
    assert run(cut_pieces(pieces, places), **options) == run(pieces, **options)


@settings(max_examples=examples(150), deadline=None)
@given(anything, st.booleans(), MODES)
def test_no_character_is_lost(text: str, declared: bool, tokens) -> None:
    events = run(as_special(text, tokens), marker_tokens=tokens, tool_specs=TOOLS if declared else ())
    shown = Counter("".join(map(_shown, events)))
    written = Counter(char for char in text if char in PAYLOAD)
    assert all(shown[char] >= num for char, num in written.items())


@given(st.text(st.characters(exclude_characters="<")))
def test_text_without_tags_is_untouched(text: str) -> None:
    assert "".join(map(_shown, run([text], tool_specs=TOOLS))) == text


@settings(max_examples=examples(150), deadline=None)
@given(texts, st.booleans())
def test_a_complete_call_is_declared_and_has_an_object(text: str, declared: bool) -> None:
    events = run([text], tool_specs=TOOLS if declared else ())
    names = {event.index: event.name for event in events if isinstance(event, ToolCallStart)}
    arguments = {event.index: event.arguments for event in events if isinstance(event, ToolCallDelta)}
    assert list(names) == list(range(len(names)))
    assert not declared or set(names.values()) <= {"get_weather", "write", "now"}
    for event in events:
        if isinstance(event, ToolCallEnd):
            assert isinstance(json.loads(arguments[event.index]), dict)


def _shown(event: ContentEvent) -> str:
    match event:
        case TextDelta(text) | ReasoningDelta(text):
            return text
        case ToolCallStart(_, _, name):
            return name
        case ToolCallDelta(_, arguments):
            return arguments
    return ""
