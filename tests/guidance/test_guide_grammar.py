"""Every form that a client may ask for: what is drawn from its grammar is of that form, what is not is kept out."""

import re
from typing import Any

import pytest

from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.request import Choice, Grammar, Guide, Regex, StructuralFormat, StructuralTag, TagStructure
from vllm_mlx.formats.family import Header
from vllm_mlx.guidance.grammars import guide_grammar

from .random_sampler import sampler

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TAG: dict[str, Any] = {
    "type": "tag",
    "begin": "<f=x>",
    "content": {"type": "json_schema", "json_schema": NUMBER},
    "end": "</f>",
}
TAGS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG]}


CALL = "<f=x>[0-9]{1,2}</f>"
SEQUENCE = {"type": "sequence", "elements": [{"type": "const_string", "value": "n="}, TAG]}
EITHER = {"type": "or", "elements": [TAG, {"type": "regex", "pattern": "[a-z]{2}"}]}
LIST = {"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": True}
FREE = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}


def takes(form: Any, text: str) -> bool:
    one = sampler()
    matcher = one.compiler.compile(guide_grammar(Guide(form=form), one.writer()), "guide").deep_copy()
    ids = one.tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (Regex(r"\d{3}/[a-c]+"), r"[0-9]{3}/[a-c]+"),
        (Regex("^(yes|no)$"), "yes|no"),
        (Choice(("yes", 'say "no"', "a/b\n")), 'yes|say "no"|a/b\n'),
        (Grammar('start: "a" B\nB: /[0-9]{1,3}/'), "a[0-9]{1,3}"),
        (StructuralFormat(SEQUENCE), f"n={CALL}"),
        (StructuralFormat(EITHER), f"{CALL}|[a-z]{{2}}"),
        (StructuralFormat(LIST), f"({CALL})(,{CALL})*"),
        (StructuralFormat(FREE), "<t>(?:(?!</t>)(?s:.))*</t>"),
    ],
)  # fmt: skip
def test_what_is_drawn_is_of_the_form(form: Any, pattern: str) -> None:
    one = sampler()
    grammar = guide_grammar(Guide(form=form), one.writer())
    for seed in range(4):
        ids = one.draw_reply(grammar, seed, most=3000, ends=0.5)
        if ids is not None:
            assert re.fullmatch(pattern, one.text(ids))


@pytest.mark.parametrize(
    "form",
    [
        StructuralTag((TagStructure("<f=x>", NUMBER, "</f>"), TagStructure("<f=y>", True, "</f>")), ("<f=",)),
        StructuralFormat(TAGS),
    ],
)
def test_text_is_free_but_for_what_a_trigger_begins(form: Any) -> None:
    assert takes(form, "Nothing <b>here</b>.")
    assert takes(form, "So <f=x>12</f> and <f=x>7</f>.")
    assert not takes(form, "So <f=x>120</f>.")
    assert not takes(form, "So <f=z>12</f>.")


def test_how_often_a_tag_may_come() -> None:
    once = StructuralFormat({**TAGS, "at_least_one": True, "stop_after_first": True})
    assert takes(once, "So <f=x>1</f>") and not takes(once, "So")


def test_a_header_stands_before_the_answer() -> None:
    one = sampler()
    header = Header("<lead>", "<answer>")
    for form in (Choice(("a",)), Grammar('start: "a"')):
        matcher = one.compiler.compile(guide_grammar(Guide(form=form), one.writer(), header), "guide")
        for text, is_taken in (("<answer>a", True), ("<lead><answer>a", True), ("a", False)):
            ids = one.tokenizer.encode(text, add_special_tokens=False)
            assert (matcher.deep_copy().try_consume_tokens(ids) == len(ids)) == is_taken


@pytest.mark.parametrize(
    ("format_", "param"),
    [
        ({"type": "tree"}, "structured_outputs.format.type"),
        ({"type": "tag", "begin": "<a>"}, "structured_outputs.format.end"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, TAG]}, "structured_outputs.format.elements[0]"),
        ({**TAGS, "triggers": ["<g="]}, "structured_outputs.format.tags[0].begin"),
        ({"type": "any_text", "excludes": ["<a>"]}, "structured_outputs.format.excludes"),
        ({**TAGS, "tags": [{**TAG, "style": 1}]}, "structured_outputs.format.tags[0].style"),
        ({"type": "sequence", "elements": [{**TAG, "": 1}]}, 'structured_outputs.format.elements[0].""'),
        (
            {"type": "json_schema", "json_schema": {"not": {}}},
            "structured_outputs.format.json_schema.not",
        ),
    ],
)
def test_a_tree_that_cannot_be_enforced_is_refused_by_its_place(format_: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        guide_grammar(Guide(form=StructuralFormat(format_)), sampler().writer())
    assert caught.value.param == param
