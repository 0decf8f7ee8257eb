"""Each tag of each family cut, doubled, left out and moved: no tag is shown, no text is lost."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.core.events import ContentEvent, ReasoningDelta, TextDelta, ToolCallDelta
from vllm_mlx.formats.family import Family as ProductFamily

from .families import Family
from .support import REASONING, REASONING_FORMATS, as_special, run, tool
from .test_each_family import CASES, PLAIN, calls, content, reasoning_name, tags_of

TOOLS = [tool("write", text={"type": "string"})]
# Letters that are in no tag: each must come out again.
THOUGHT, ANSWER, FIRST, SECOND = "Γγ Дд", "Ωω Жж", "東", "京"
PAYLOAD = frozenset(THOUGHT + ANSWER + FIRST + SECOND) - {" "}
WRAPS = {
    "cohere_command3": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "inkling": ("<|message_model|><|content_text|>", "<|end_message|>"),
    "kimi_k3": ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    "gpt-oss": ("<|start|>assistant<|channel|>final<|message|>", "<|end|>"),
    "muse": ("<|start|>assistant to=user<|message|>", "<|eom|>"),
}
BEFORE_CALLS = {"gpt-oss": "<|start|>assistant", "muse": "<|start|>assistant to=write<|message|>"}
# A tag is shown where the reply writes about it: behind a quotation mark, or like a word between words.
MENTION = r"[\"'`]@| @(?: ?\w|[.,;:!?)])"
Mutation = tuple[str, str]  # what was done, and the text


def replies(family: ProductFamily, writer: Family) -> Iterator[str]:
    """Reasoning, content, one call and two calls."""
    open, close = next((REASONING[n] for n in REASONING if REASONING_FORMATS[n] is family.reasoning), ("", ""))
    wrap = (family.reasoning.wrap if family.reasoning else None) or WRAPS.get(family.name, ("", ""))
    thought = f"{open}{THOUGHT}{close}" if open else ""
    answer = wrap[0] + ANSWER + wrap[1]
    first, second = (("write", {"text": text}) for text in (FIRST, SECOND))
    one, two = writer.calls(first), writer.calls(first, second)
    before = "" if one.startswith("<|start|>") else BEFORE_CALLS.get(family.name, "")
    yield thought + answer
    yield (close if family.reasoning is not None and family.reasoning.is_implied else "") + answer
    yield thought + before + one
    yield thought + before + two
    if writer.name not in PLAIN or writer.tokens:
        yield f"{thought}{answer} {before}{one}"


def places(family: ProductFamily, writer: Family, text: str) -> list[tuple[int, int]]:
    """Where tags begin and end in the text."""
    tags = {*tags_of(family), *writer.tokens, *(family.reasoning.tags if family.reasoning else ())}
    pattern = "|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True) if len(tag) > 2)
    return [found.span() for found in re.finditer(pattern or r"(?!)", text)]


def mutations(text: str, spans: list[tuple[int, int]]) -> Iterator[Mutation]:
    yield "unchanged", text
    for index, (start, end) in enumerate(spans):
        tag, before, behind = text[start:end], text[:start], text[end:]
        yield "left out", before + behind
        yield "doubled", before + tag + tag + behind
        yield "doubled in lines", f"{before}{tag}\n{tag}{behind}"
        yield "cut at its end", before + tag[:-1] + behind
        yield "cut at its start", before + tag[1:] + behind
        yield "cut in half", before + tag[: len(tag) // 2] + behind
        yield "moved to the start", tag + before + behind
        yield "moved to the end", before + behind + tag
        yield "the reply ends in it", before + tag[: len(tag) // 2]
        yield "the reply ends behind it", before + tag
        if index:
            to = spans[index - 1][0]
            yield "moved before the last one", text[:to] + tag + text[to:start] + behind
        if index + 1 < len(spans):
            to = spans[index + 1][1]
            yield "moved behind the next one", before + text[end:to] + tag + text[to:]


def visible(events: list[ContentEvent]) -> Counter[str]:
    texts = [event.text for event in events if isinstance(event, TextDelta | ReasoningDelta)]
    return Counter("".join([*texts, *(event.arguments for event in events if isinstance(event, ToolCallDelta))]))


def check(family: ProductFamily, writer: Family, text: str, **options: Any) -> list[ContentEvent]:
    options = {"reasoning": reasoning_name(family), "tools": family.call_choices[0], **options}
    whole = run([text], **options)
    assert run(text, **options) == whole, text
    pieces, tokens = as_special(text, writer.tokens), frozenset(writer.tokens)
    by_token = run(pieces, marker_tokens=tokens, **options)
    small = [part for piece, special in pieces for part in ([(piece, True)] if special else list(piece))]
    assert run(small, marker_tokens=tokens, **options) == by_token, text
    for events in (whole, by_token):
        seen = visible(events)
        assert all(seen[char] >= num for char, num in Counter(text).items() if char in PAYLOAD), (text, events)
        for tag in tags_of(family):
            assert tag not in content(events) or re.search(MENTION.replace("@", re.escape(tag)), text), (text, events)
    return whole


def every(family: ProductFamily, writer: Family) -> list[Mutation]:
    texts = replies(family, writer)
    each = [mutation for text in texts for mutation in mutations(text, places(family, writer, text))]
    return list({text: (name, text) for name, text in each}.values())


@row("S0-4")
@pytest.mark.parametrize(("number", "case"), enumerate(CASES), ids=[str(case.id) for case in CASES])
def test_a_few_broken_replies(number: int, case: Any) -> None:
    family, writer = case.values
    step = 13
    for _, text in itertools.islice(every(family, writer), number % step, None, step):
        check(family, writer, text, tool_specs=TOOLS, is_end=True)


@pytest.mark.full
@pytest.mark.parametrize("is_end", [False, True])
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(("family", "writer"), CASES)
def test_every_broken_reply(family: ProductFamily, writer: Family, declared: bool, is_end: bool) -> None:
    for _, text in every(family, writer):
        check(family, writer, text, tool_specs=TOOLS if declared else (), is_end=is_end)


KEYED = "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>東</arg_value>\n</tool_call>"
FUNCTION = "<tool_call>\n<function=write>\n<parameter=text>\n東\n</parameter>\n</function>\n</tool_call>"
DSML_CALL = '<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="true">東</｜DSML｜parameter>\n'
HEADED = '<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"text": "東"}<|call|>'


@pytest.mark.parametrize(
    ("name", "text", "tags"),
    [
        ("qwen3_xml", FUNCTION, ("<tool_call>", "<function=", "<function=write>", "<parameter=", "</function>")),
        ("glm45", KEYED, ("<tool_call>", "<arg_key>", "</arg_key>", "</tool_call>")),
        ("deepseek_v4", f"{DSML_CALL}</｜DSML｜invoke>\n", ('<｜DSML｜invoke name="write">', "</｜DSML｜invoke>")),
        ("muse", f"{DSML_CALL}</｜DSML｜invoke>\n".replace("｜DSML｜", "atem:"), ('<atem:invoke name="write">',)),
        ("openai", HEADED, ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")),
        ("mistral", '[TOOL_CALLS]write[ARGS]{"text": "東"}', ("[TOOL_CALLS]", "[ARGS]")),
        (
            "deepseek_v31",
            '<｜tool▁call▁begin｜>write<｜tool▁sep｜>{"text": "東"}',
            ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        ),
    ],
)
def test_a_tag_written_twice_inside_a_call_is_read_once(name: str, text: str, tags: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"reasoning": None, "tools": name, "tool_specs": TOOLS, "is_end": True}
    for tag, between in itertools.product(tags, ("", "\n")):
        doubled = text.replace(tag, f"{tag}{between}{tag}", 1)
        events = run([doubled], **options)
        assert calls(events) == [("write", {"text": "東"})], doubled
        assert content(events).strip() == ""
        assert run(doubled, **options) == events
        special = as_special(doubled, (tag,))
        assert calls(run(special, marker_tokens=frozenset({tag}), **options)) == calls(events), doubled


RECIPIENTS = ["browser", "browser.search", "python", "container.exec", "web.run", "file_search"]


@pytest.mark.parametrize("recipient", RECIPIENTS)
def test_a_message_to_no_tool_is_neither_content_nor_a_call(recipient: str) -> None:
    header = f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>"
    text = f"{header}東<|call|><|start|>assistant<|channel|>final<|message|>京<|return|>"
    events = run([text], reasoning="openai_gptoss", tools="openai", tool_specs=TOOLS)
    assert events == [ReasoningDelta("東"), TextDelta("京")]


@pytest.mark.parametrize("role", ["assistant", "system", "developer", "self"])
def test_a_message_to_another_role_is_shown_only_if_it_is_all_there_is(role: str) -> None:
    text = (
        f"to={role}<|channel|>commentary<|message|>東<|end|><|start|>assistant<|channel|>final<|message|>京<|return|>"
    )
    options: dict[str, Any] = {"reasoning": "openai_gptoss", "tools": "openai", "tool_specs": TOOLS}
    alone = text[: text.index("<|start|>")]
    for pieces, alone_in_pieces in (([text], [alone]), (text, alone)):
        assert run(pieces, **options) == [TextDelta("京")]
        assert run(alone_in_pieces, **options) == [TextDelta("東")], "it is all there is"


@pytest.mark.parametrize(("family", "writer"), CASES)
def test_calls_are_recovered(family: ProductFamily, writer: Family) -> None:
    """Calls count if the last closing tag is doubled, cut or missing."""
    assert family.calls is not None
    *_, text = itertools.islice(replies(family, writer), 4)
    options = {"reasoning": reasoning_name(family), "tools": family.call_choices[0], "is_end": True}
    made = calls(run([text], tool_specs=TOOLS, **options))
    assert [arguments["text"] for _, arguments in made] == [FIRST, SECOND]
    for start, end in places(family, writer, text)[-1:]:
        if text[start:end] in family.calls.reads.closes and text[end:].strip() == "":
            for broken in (text[:start], text[: end - 1], text + text[start:end]):
                assert calls(run([broken], tool_specs=TOOLS, **options)) == made, broken
