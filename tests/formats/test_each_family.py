"""The same cases for every family of the product's table, a new one included: what goes wrong around calls."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.core.events import ContentEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from vllm_mlx.formats.families import FAMILIES as PRODUCT
from vllm_mlx.formats.family import Family as ProductFamily
from vllm_mlx.formats.family import Opening, Place

from .families import FAMILIES, Arguments, Family
from .support import REASONING, REASONING_FORMATS, TOOL_FORMATS, as_special, run, tool

TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("write", text={"type": "string"}),
    tool("now"),
]
ROME: Arguments = {"city": "Rome", "days": 2}
# Formats whose calls are plain text: an answer may look like an undeclared call, and an empty list is an answer.
PLAIN = {"llama3_json", "pythonic", "xlam"}
# Words and XML that every text may contain are no tags.
COMMON = {"<invoke", "</invoke>", "<parameter", "</parameter>", "<function", "</function>", "<param", "</param>"}
COMMON |= {"<tools>", "</tools>"}


def reasoning_name(family: ProductFamily) -> str | None:
    return family.reasoning_choices[0] if family.reasoning is not None else None


def writers(family: ProductFamily) -> list[Family]:
    """The tests' own spellings of the family's calls."""
    return [each for each in FAMILIES if family.calls and TOOL_FORMATS[each.name] is family.calls.reads]


def tags_of(family: ProductFamily) -> set[str]:
    """The tags of the family's own format, none of which may be shown."""
    tags = [*(family.calls.reads.tags if family.calls else ()), *(family.reasoning.tags if family.reasoning else ())]
    return {tag for tag in tags if len(tag) > 3 and tag[0] in "<[]" and tag not in COMMON}


WITH_CALLS = [family for family in PRODUCT if family.calls is not None and family.name != "generic"]
CASES = [
    pytest.param(family, writer, id=f"{family.name}-{number}")
    for family in {(id(each.calls), id(each.reasoning)): each for each in WITH_CALLS}.values()
    for number, writer in enumerate(writers(family))
]
each_case = pytest.mark.parametrize(("family", "writer"), CASES)


def events_of(family: ProductFamily, text: str, tokens: Iterable[str], **options: Any) -> list[ContentEvent]:
    """The events of a text: the same whole, by character, and with its tags as tokens; no tag is shown."""
    options = {"reasoning": reasoning_name(family), "tool_specs": TOOLS, **options}
    names = family.call_choices
    options["tools"] = names[0] if family.calls else None
    whole = run([text], **options)
    assert run(text, **options) == whole, text
    special = as_special(text, tokens)
    in_tokens = run(special, marker_tokens=frozenset(tokens), **options) if tokens else whole
    for events in (whole, in_tokens):
        if family.reasoning is None or not family.reasoning.is_shown:
            shown = content(events)
            assert not [tag for tag in tags_of(family) if tag in shown], (text, shown)
    return whole


def content(events: list[ContentEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def reasoned(events: list[ContentEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningDelta))


def calls(events: list[ContentEvent]) -> list[Any]:
    """Names and arguments of the complete calls."""
    names = {event.index: event.name for event in events if isinstance(event, ToolCallStart)}
    arguments = {event.index: event.arguments for event in events if isinstance(event, ToolCallDelta)}
    ended = [event.index for event in events if isinstance(event, ToolCallEnd)]
    return [(names[index], json.loads(arguments[index])) for index in ended]


def answered(family: ProductFamily, text: str) -> str:
    """The text behind the end of reasoning, where a reply of the family begins with reasoning."""
    return f"</think>{text}" if family.reasoning is not None and family.reasoning.is_implied else text


def openings(family: ProductFamily) -> list[Opening]:
    assert family.calls is not None
    return [each for each in family.calls.reads.openings if each.place is Place.ANYWHERE]


# Every family has its rows


@pytest.mark.parametrize("family", PRODUCT, ids=lambda family: family.name)
def test_every_family_has_spellings_of_its_calls_and_of_its_reasoning(family: ProductFamily) -> None:
    """A new family needs a row of tests/formats/families.py, unless another row spells the same format."""
    if family.calls is not None and family.name != "generic":
        assert writers(family)
    if family.reasoning is not None and not family.reasoning.is_shown:
        assert any(REASONING_FORMATS[name] is family.reasoning for name in REASONING)


# Calls


@row("S4-33")
@each_case
def test_an_undeclared_call_is_shown_without_tags(family: ProductFamily, writer: Family) -> None:
    written = writer.calls(("rm", {"path": "/", "n": 3}))
    shown = content(events_of(family, answered(family, f"So: {written}"), writer.tokens))
    if writer.name in PLAIN and not writer.tokens:
        assert shown == f"So: {written}"
    else:
        assert json.loads(shown.removeprefix("So: ")) == {"name": "rm", "arguments": {"path": "/", "n": 3}}


@row("S4-33")
@each_case
def test_undeclared_calls_are_lines_of_their_own(family: ProductFamily, writer: Family) -> None:
    text = writer.calls(("rm", {"path": "/"}), ("get_weather", ROME), ("rm", {"path": "/b"}))
    events = events_of(family, answered(family, text), writer.tokens)
    assert calls(events) == [("get_weather", ROME)]
    if writer.name not in PLAIN or writer.tokens:
        shown = [json.loads(line) for line in content(events).split("\n") if line.strip(", ;")]
        assert [each["arguments"]["path"] for each in shown] == ["/", "/b"]


@each_case
def test_an_empty_block_is_nothing(family: ProductFamily, writer: Family) -> None:
    assert family.calls is not None
    closes = [close for close in family.calls.reads.closes if not close.startswith("`") and close not in COMMON] or [""]
    for opening in openings(family):
        for inner in ("", "\n", " \n\n"):
            for close in (*closes, ""):
                text = opening.marker + inner + close
                if opening.marker in tags_of(family) and not opening.keeps_marker:
                    assert content(events_of(family, answered(family, text), writer.tokens)).strip() == ""
    if family.calls.reads.closes and writer.name not in PLAIN and not openings(family)[0].keeps_marker:
        block = openings(family)[0].marker + closes[-1]
        shown = content(events_of(family, answered(family, f"Hi {block}there"), writer.tokens))
        assert shown == "Hi there" or family.name == "gpt-oss"  # a header that never ends is read as text


@each_case
def test_an_empty_list_or_object_in_tags_is_nothing(family: ProductFamily, writer: Family) -> None:
    if writer.open and writer.open.endswith("[") and not writer.open.startswith("`"):
        for text in (writer.open + writer.close, f"{writer.open} {writer.close}\n"):
            assert content(events_of(family, answered(family, text), writer.tokens)).strip() == ""
        if writer.open == "[":  # plain text: more of it says that the list is an answer
            events = events_of(family, answered(family, "[] is an empty list."), writer.tokens)
            assert content(events) == "[] is an empty list."


@each_case
def test_a_reply_cut_at_any_character_shows_no_tag(family: ProductFamily, writer: Family) -> None:
    options = {"reasoning": reasoning_name(family), "tools": family.call_choices[0], "tool_specs": TOOLS}
    tags = tags_of(family)
    for name, arguments in (("get_weather", ROME), ("rm", {"path": "/"})):
        text = answered(family, writer.calls((name, arguments)))
        for end in range(len(text)):
            for is_end in (False, True):
                shown = content(run([text[:end]], is_end=is_end, **options))
                assert not [tag for tag in tags if tag in shown], (text[:end], shown)
                assert name == "rm" or "get_weather" not in shown or writer.name in PLAIN or end < len(text)


@each_case
def test_doubled_tags_count_once(family: ProductFamily, writer: Family) -> None:
    assert family.calls is not None
    text = writer.calls(("get_weather", ROME))
    first = max((each.marker for each in openings(family) if text.startswith(each.marker)), key=len, default="")
    last = max((close for close in family.calls.reads.closes if text.rstrip().endswith(close)), key=len, default="")
    for doubled in (first + text, text + last, first + "\n" + text + "\n" + last):
        events = events_of(family, answered(family, doubled), writer.tokens)
        assert calls(events) == [("get_weather", ROME)]
        assert content(events).strip() == ""


@each_case
def test_one_closer_too_many_is_nothing(family: ProductFamily, writer: Family) -> None:
    text = writer.calls(("get_weather", ROME))
    last = max((place for char in "})" if (place := text.rfind(char)) > text.rfind("2")), default=-1)
    if last >= 0:
        events = events_of(family, answered(family, text[:last] + text[last] + text[last:]), writer.tokens)
        assert calls(events) == [("get_weather", ROME)]
        assert content(events).strip() == ""


@each_case
def test_tags_in_a_string_are_data(family: ProductFamily, writer: Family) -> None:
    opens = [each.marker for each in openings(family)]
    inside = f"a {(opens or ['<x>'])[0]} {writer.inside}"
    text = writer.calls(("write", {"text": inside}))
    options = {"reasoning": reasoning_name(family), "tools": family.call_choices[0], "tool_specs": TOOLS}
    assert calls(run([answered(family, text)], **options)) == [("write", {"text": inside})]
    assert calls(run(answered(family, text), **options)) == [("write", {"text": inside})]


@each_case
def test_a_call_without_its_wrapper(family: ProductFamily, writer: Family) -> None:
    """Where a call has tags of its own, it needs no section; otherwise its text is shown, without tags."""
    if writer.open:
        text = writer.call("get_weather", ROME, 0)
        events = events_of(family, answered(family, text), writer.tokens)
        assert calls(events) == [("get_weather", ROME)] or (not writer.is_found_alone and "Rome" in content(events))
        assert "Rome" not in content(events) or not calls(events)


@each_case
def test_a_call_ends_unfinished_reasoning(family: ProductFamily, writer: Family) -> None:
    spelled = next((tags for name, tags in REASONING.items() if REASONING_FORMATS[name] is family.reasoning), None)
    if spelled is None or (writer.name in PLAIN and not writer.tokens):
        return
    text = f"{spelled[0]}\nhm\n{writer.calls(('get_weather', ROME))}"
    events = events_of(family, text, writer.tokens)
    if writer.reasons_first:
        assert reasoned(events) == "hm"
        assert calls(events) == [("get_weather", ROME)]
    assert content(events).strip() == ""


@each_case
def test_a_stray_closing_tag_is_nothing(family: ProductFamily, writer: Family) -> None:
    assert family.calls is not None
    for close in family.calls.reads.closes:
        if not close.startswith("`") and close not in COMMON:
            assert content(events_of(family, answered(family, f"Done.{close}"), writer.tokens)) == "Done."
            assert content(events_of(family, answered(family, f"{close}\nHi"), writer.tokens)).strip() == "Hi"


@each_case
def test_a_tag_that_is_quoted_is_shown(family: ProductFamily, writer: Family) -> None:
    options = {"reasoning": reasoning_name(family), "tools": family.call_choices[0], "tool_specs": TOOLS}
    for opening in openings(family):
        if opening.marker.startswith("<"):
            for text in (
                f"Write `{opening.marker}` here.",
                f"```\n{opening.marker}\n```\nso",
                f'The "{opening.marker}" tag',
            ):
                assert content(run(answered(family, text), **options)) == text


ABOUT = ["Use @ {json} for it.", "Write @ in XML.", "The @ token", "The @, the @ and @."]


@each_case
def test_text_about_a_tag_keeps_the_tag_or_loses_it_whole(family: ProductFamily, writer: Family) -> None:
    assert family.calls is not None
    tags = tags_of(family) - set(family.reasoning.tags if family.reasoning else ())
    for tag in sorted(tag for tag in tags if not tag.startswith("<|open|>")):
        whole = tag if tag.endswith((">", "]", "[")) else f"{tag}f>" if tag.endswith("=") else f'{tag} name="f">'
        for about in ABOUT:
            text = about.replace("@", whole)
            events = run([text], reasoning=reasoning_name(family), tools=family.call_choices[0], tool_specs=TOOLS)
            shown = " ".join((content(events) or reasoned(events)).split())
            assert shown in {" ".join(one.split()) for one in (text, about.replace("@", ""))}, text


# Reasoning


@pytest.mark.parametrize("name", [name for name, (open, _) in REASONING.items() if open[0] in "<["])
def test_doubled_tags_of_reasoning_count_once(name: str) -> None:
    open, close = REASONING[name]
    events = run([f"{open}{open}hm{close}{close}Hi"], reasoning=name, tools=None)
    assert events == [ReasoningDelta("hm"), TextDelta("Hi")]


@pytest.mark.parametrize("name", REASONING)
def test_unfinished_reasoning_is_no_content(name: str) -> None:
    open, _ = REASONING[name]
    for text in (f"{open}hm", f"{open}\nhm"):
        assert run([text], reasoning=name, tools=None) == [ReasoningDelta("hm")]
        assert content(run([open], reasoning=name, tools=None)) == ""
