"""Whatever a model writes, in whatever format: no error, nothing lost, no effect of the cuts."""

import json
import re
from collections import Counter
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from tests.support.named_formats import OutputParser
from tests.support.rows import row
from vllm_mlx.core.events import ContentEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

from .families import FAMILIES
from .support import REASONING_FORMATS, TOOL_FORMATS, Piece, as_special, run, schemas_of, tool

# Letters that are in no tag, no key and no tool name: each must come out again.
PAYLOAD = "QΩЖ東🙂"
TOOLS = [tool("now", q={"type": "string"}, t={"type": "array"}), tool("write", text={})]
TOOL_NAMES = sorted({id(format): name for name, format in reversed(TOOL_FORMATS.items())}.values())
REASONING_NAMES = sorted({id(format): name for name, format in reversed(REASONING_FORMATS.items())}.values())
MAX_HEADER_WORDS = 5
COMMON = [
    '{"name": "now", "arguments": {"q": "',
    '{"name": "rm", "parameters": {', '"}}', "}}", "}", "]", "[", "(", ")", ", ",
    "now", "rm", "functions.now:0", "call:now{", "now(q='", "')", "[now(", "q", ":", "=", "text", '"', "'", "\\", "\n",
    " ", "\n\n", "name=", '"now">', '"q">', "<item>", "1", "-2.5", "true", "None", "\\u00", "analysis", "final",
    " to=functions.now", "commentary", "json", "</", "<", ">", "```", ";", *PAYLOAD,
]  # fmt: skip


@cache
def fragments(tools: str, reasoning: str) -> st.SearchStrategy[list[str]]:
    """Pieces of the format's own tags, whole and broken, of its calls, and of anything."""
    tags = [*TOOL_FORMATS[tools].tags, *REASONING_FORMATS[reasoning].tags]
    broken = [tag[: len(tag) // 2] for tag in tags if len(tag) > 3]
    calls = [family.calls(("now", {"q": "QΩ"}), ("write", {})) for family in FAMILIES if family.name == tools]
    halves = [part for call in calls for part in (call[: len(call) // 3], call[len(call) // 3 :], call)]
    pieces = st.sampled_from([*(tag for tag in tags if tag), *broken, *halves, *COMMON])
    return st.lists(st.one_of(pieces, pieces, pieces, st.text(max_size=4)), max_size=14)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def shown(events: list[ContentEvent]) -> str:
    texts = []
    for event in events:
        match event:
            case TextDelta(text) | ReasoningDelta(text):
                texts.append(text)
            case ToolCallStart(_, call_id, name):
                texts.append(call_id + name)
            case ToolCallDelta(_, arguments):
                texts.append(arguments)
    return "".join(texts)


def without_cut_header(text: str, reasoning: str) -> str:
    """The text without the header of a message at its end: a few words, or the one word that a tag carries."""
    markers = [header.marker for header in REASONING_FORMATS[reasoning].headers]
    for found in re.finditer("|".join(map(re.escape, markers)) or r"(?!)", text):
        is_word = re.fullmatch(r"[\w-]{0,64}", text[found.end() :]) is not None
        if (is_word or found.group()[-1] != ":") and len(text[found.start() :].split()) <= MAX_HEADER_WORDS:
            return text[: found.start()]
    return text


names = st.tuples(st.sampled_from(TOOL_NAMES), st.sampled_from(REASONING_NAMES))
inputs = names.flatmap(lambda pair: st.tuples(st.just(pair), fragments(*pair).map("".join)))


@row("S0-4")
@settings(max_examples=examples(250), deadline=None)
@given(inputs, st.lists(st.integers(0, 400), max_size=5), st.booleans(), st.booleans(), st.booleans())
def test_cuts_do_not_matter(
    case: Any, places: list[int], declared: bool, starts_in_reasoning: bool, is_end: bool
) -> None:
    (tools, reasoning), text = case
    options = {
        "tools": tools,
        "reasoning": reasoning,
        "tool_specs": TOOLS if declared else (),
        "starts_in_reasoning": starts_in_reasoning,
        "is_end": is_end,
    }
    whole = run([text], **options)
    assert run(cut(text, places), **options) == whole
    assert run(list(text), **options) == whole


@settings(max_examples=examples(150), deadline=None)
@given(inputs, st.lists(st.integers(0, 400), max_size=5), st.booleans(), st.booleans())
def test_cuts_between_tokens_do_not_matter(case: Any, places: list[int], declared: bool, known: bool) -> None:
    (tools, reasoning), text = case
    tags = [tag for tag in (*TOOL_FORMATS[tools].tags, *REASONING_FORMATS[reasoning].tags) if len(tag) > 2]
    tokens = frozenset(tags if known else ())
    pieces = as_special(text, sorted(tags, key=len, reverse=True))
    smaller: list[Piece] = [
        (part, special) for text, special in pieces for part in ([text] if special else cut(text, places))
    ]
    options = {"tools": tools, "reasoning": reasoning, "tool_specs": TOOLS if declared else (), "marker_tokens": tokens}
    assert run(smaller, **options) == run(pieces, **options)


@settings(max_examples=examples(250), deadline=None)
@given(inputs)
def test_no_character_is_lost_where_no_call_is_made(case: Any) -> None:
    (tools, reasoning), text = case
    options = {"tools": tools, "reasoning": reasoning, "tool_specs": [tool("other")]}
    events = run([text], **options, takes_undeclared=True)
    if not any(isinstance(event, ToolCallStart) for event in events):  # a call that was read is shown as JSON
        visible = Counter(shown(run([text], **options)))
        written = Counter(without_cut_header(text, reasoning))
        assert all(visible[char] >= num for char, num in written.items() if char in PAYLOAD), text


@settings(max_examples=examples(150), deadline=None)
@given(inputs, st.booleans(), st.booleans())
def test_a_complete_call_is_declared_and_has_an_object(case: Any, declared: bool, is_end: bool) -> None:
    (tools, reasoning), text = case
    events = run([text], tools=tools, reasoning=reasoning, tool_specs=TOOLS if declared else (), is_end=is_end)
    started = {event.index: event.name for event in events if isinstance(event, ToolCallStart)}
    arguments = {event.index: event.arguments for event in events if isinstance(event, ToolCallDelta)}
    assert list(started) == list(range(len(started)))
    assert not declared or set(started.values()) <= {"now", "write"}
    ended = [event.index for event in events if isinstance(event, ToolCallEnd)]
    for index in ended:
        assert isinstance(json.loads(arguments[index]), dict)
    left_open = [index for index in started if index not in ended]
    if left_open:  # a limit cut the reply inside the last call
        assert not is_end
        assert left_open == [len(started) - 1]
        assert isinstance(events[-1], ToolCallStart | ToolCallDelta)


@settings(max_examples=examples(150), deadline=None)
@given(inputs, st.lists(st.integers(0, 400), max_size=5))
def test_text_spans_say_what_a_text_stands_for(case: Any, places: list[int]) -> None:
    """In order, within what was fed; a text as long as its span is the text there."""
    (tools, reasoning), text = case
    if REASONING_FORMATS[reasoning].is_shown:
        return  # its first tag may be added
    parser = OutputParser(reasoning, tools, schemas=schemas_of(TOOLS))
    shown_to = num_fed = 0
    for piece in [*cut(text, places), None]:
        num_fed += len(piece or "")
        events = parser.feed(piece) if piece is not None else parser.finish()
        parts = [event.text for event in events if isinstance(event, TextDelta)]
        for part, (start, end) in zip(parts, parser.text_spans, strict=True):
            assert shown_to <= start <= end <= num_fed
            assert text[start:end] == part or end - start != len(part) or "{" in part
            shown_to = end


@given(st.sampled_from(TOOL_NAMES), st.text(st.characters(exclude_characters="<[{]t`f")))
def test_text_without_tags_is_untouched(tools: str, text: str) -> None:
    assert shown(run([text], tools=tools, reasoning="qwen3", tool_specs=TOOLS)) == text
