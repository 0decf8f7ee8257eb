"""Any history of an agent, through templates that take less than the API allows: every text once and in its order."""

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.drawing import examples
from tests.support.rows import cases
from vllm_mlx.core.errors import RequestError, TemplateError
from vllm_mlx.core.messages import ImagePart, Message, TextPart, ToolCallPart, ToolResultPart, ToolSpec
from vllm_mlx.core.request import Request
from vllm_mlx.formats.family import JsonCall, Spelling
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.encoded import common_prefix
from vllm_mlx.prompt.template import ChatTemplate, MediaMarkers, Rendered
from vllm_mlx.prompt.template_messages import CallStyle, in_style, template_messages
from vllm_mlx.runner.checkpoint import DEMO_PATH

from .histories import SHAPES, TOOLS, History, history, random_shape
from .needs import NEEDS
from .turns import Session, canonical, make_processor, system, user

REAL = sorted(Path(os.environ.get("VLLM_MLX_TEMPLATES", "/nowhere")).glob("*.jinja"))  # templates of real models


@cache
def tokenizer(template: str) -> Tokenizer:
    hf = AutoTokenizer.from_pretrained(DEMO_PATH)
    hf.bos_token = "<|endoftext|>"
    return Tokenizer(hf, chat_template=template)


@cache
def chat_template(template: str) -> ChatTemplate:
    return ChatTemplate(tokenizer(template))


def render(template: str, made: History, tools: tuple[ToolSpec, ...] = TOOLS) -> Rendered:
    request = Request(request_id="r", messages=tuple(made.messages), tools=tools)
    return chat_template(template).render_prompt(request)


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("tools", [TOOLS, ()], ids=["tools", "no tools"])
def test_every_history_is_whole(need: str, tools: tuple[ToolSpec, ...]) -> None:
    faults = {shape: history(shape).fault(render(NEEDS[need], history(shape), tools).text) for shape in SHAPES}
    assert {shape: fault for shape, fault in faults.items() if fault} == {}


DRAWN = sorted(NEEDS.keys() - {"results are users", "first call only"})  # which lose some results that come too late


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(DRAWN), st.integers(0, 1 << 20))
def test_random_histories_are_whole(need: str, seed: int) -> None:
    made = history(random_shape(random.Random(seed)))
    if made.messages:
        assert made.fault(render(NEEDS[need], made).text) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_a_template_that_takes_all_gets_what_the_client_sent(shape: str) -> None:
    made = history(shape)
    rendered = render(NEEDS["takes all"], made)
    assert rendered.rules == ()
    sent = template_messages(in_style(made.messages, CallStyle(), Spelling(JsonCall())))
    tools = [tool.to_openai() for tool in TOOLS]
    assert rendered.text == tokenizer(NEEDS["takes all"]).apply_chat_template(
        sent, tools=tools, add_generation_prompt=True
    )


RULES = {
    "alternation": ("uu", "order of turns"),
    "alternation, text or calls": ("utrr", "text beside calls"),
    "results are users": ("udrr", "one call a turn"),
    "one call": ("udrr", "one call a turn"),
    "first call only": ("udrr", "one call a turn"),
    "no calls": ("ucr", "calls as text"),
    "no calls, no results": ("ucr", "results as text"),
    "calls before text": ("utrr", "text beside calls"),
    "ids": ("ucr", "ids of calls"),
    "ids once": ("ucr", "ids of calls"),
    "a user": ("cr", "a user's turn"),
    "results behind calls": ("uou", "results without a call"),
    "no empty messages": ("uxu", "empty messages"),
    "system last": ("sucr", "system messages"),
}


@pytest.mark.parametrize("need", RULES)
def test_the_rule_is_named_for_the_conversation_and_for_the_template(need: str) -> None:
    shape, rule = RULES[need]
    assert rule in render(NEEDS[need], history(shape)).rules
    assert rule in chat_template(NEEDS[need]).needs()
    assert chat_template(NEEDS["takes all"]).needs() == ()


# Each rule in words


def text_of(need: str, *messages: Message, tools: tuple[ToolSpec, ...] = TOOLS) -> str:
    request = Request(request_id="r", messages=messages, tools=tools)
    text = chat_template(NEEDS[need]).render_prompt(request).text.replace("<|im_end|>\n", "")
    return text[text.find("<|im_start|>") :].replace("<|im_start|>", "|").replace("\n", " ")


def said(text: str) -> Message:
    return Message("assistant", (TextPart(text),))


def asked(*paths: str, text: str = "") -> Message:
    calls = (ToolCallPart(f"call_{path}", "read_file", {"path": path}) for path in paths)
    return Message("assistant", (*([TextPart(text)] if text else []), *calls))


def result(path: str, text: str) -> Message:
    return Message("tool", (ToolResultPart(f"call_{path}", (TextPart(text),)),))


def test_turns_of_one_role_are_joined_by_a_blank_line() -> None:
    text = text_of("alternation", user("a"), user("b"), said("c"), said("d"), user("e"))
    assert text == "|user a  b|assistant c  d|user e|assistant "


def test_a_text_behind_a_result_joins_it_and_a_first_reply_gets_a_question() -> None:
    text = text_of("alternation", said("hi"), user("read"), asked("a"), result("a", "x"), user("be brief"))
    call = '<call>{"arguments": {"path": "a"}, "name": "read_file"}</call>'
    assert text.replace('{"name": "read_file", "arguments": {"path": "a"}}', call[6:-7]) == (
        f"|user |assistant hi|user read|assistant {call}|tool x  be brief|assistant "
    )


def test_results_follow_their_own_calls_whatever_their_order() -> None:
    text = text_of("one call", user("read"), asked("a", "b"), result("b", "two"), result("a", "one"))
    places = [text.find(part) for part in ('"a"', "one", '"b"', "two")]
    assert places == sorted(places) and -1 not in places


def test_calls_that_the_template_never_writes_are_written_as_the_model_writes_them() -> None:
    text = text_of("no calls", user("read"), asked("a", text="Well."), result("a", "one"))
    call = '<tool_call> {"name": "read_file", "arguments": {"path": "a"}} </tool_call>'
    assert text == f"|user read|assistant Well.{call}|tool one|assistant "


def test_ids_count_through_the_conversation() -> None:
    turns = (asked("a", "b"), result("a", "one"), result("b", "two"), asked("c"), result("c", "three"))
    text = text_of("ids", user("read"), *turns)
    for number in range(3):
        assert text.count(f"functions.read_file:{number}") == 2
    assert text.find("functions.read_file:2three") > 0


SHOWS_IMAGES_OF_USERS = (
    "{%- for m in messages -%}{{- '|' + m.role + ' ' -}}{%- if m.content is string or m.role == 'tool' -%}"
    "{{- m.content | string -}}{%- else -%}{%- for part in m.content -%}"
    "{{- '<I>' if part.type == 'image' else part.text + ' ' -}}{%- endfor -%}{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}{{- call.function | tojson -}}{%- endfor -%}{%- endfor -%}"
)


def test_ids_that_a_client_uses_again_lose_no_result() -> None:
    turns = [
        Message("assistant", (ToolCallPart("call_0", "read_file", {"path": f"ask{number}"}),)) for number in range(2)
    ]
    results = [
        Message("tool", (ToolResultPart(call_id, (TextPart(f"said{number}"),)),))
        for number, call_id in enumerate(["call_0", "call_gone", "call_0", "call_gone"])
    ]
    sent = [user("read"), turns[0], *results[:2], user("again"), turns[1], *results[2:]]
    text = text_of("ids once", *sent)
    shown = ["ask0", "said0", "said1", "again", "ask1", "said2", "said3"]
    assert [text.count(part) for part in shown] == [1] * len(shown)
    assert sorted(shown, key=text.find) == shown


def test_an_image_of_a_result_is_shown_behind_the_results() -> None:
    made = ChatTemplate(tokenizer(SHOWS_IMAGES_OF_USERS), markers=MediaMarkers("<I>"))
    content = (TextPart("file"), ImagePart(b"1", text="pixels"))
    turns = (user("read"), asked("a"), Message("tool", (ToolResultPart("call_a", content),)), user("so?"))
    rendered = made.render_prompt(Request(request_id="r", messages=turns))
    assert rendered.text[rendered.media_starts[0] :].startswith("pixels")
    assert rendered.rules == ("images in results",)
    assert rendered.text.find("file") < rendered.media_starts[0] < rendered.text.find("so?")


def test_fields_that_a_template_demands_of_tools_are_empty() -> None:
    tools = (ToolSpec("bare", None, None), ToolSpec("open", "Does.", {"type": "object"}))
    request = Request(request_id="r", messages=(user("a"),), tools=tools)
    assert chat_template(NEEDS["fields of tools"]).render_prompt(request).text.startswith("[bare][openDoes.]")
    text = chat_template("{{ tools | tojson }}").render_prompt(request).text
    assert "description" not in text.partition("open")[0] and "properties" not in text


def test_a_tool_that_the_template_cannot_show_is_named() -> None:
    template = NEEDS["takes all"].replace("tool.function.name", "tool.function.name + tool.function.parameters.type")
    broken = ToolSpec("broken", "Does.", {"type": ["object", "null"]})
    request = Request(request_id="r", messages=(user("a"),), tools=(*TOOLS, broken, *TOOLS[:1]))
    with pytest.raises(TemplateError, match="cannot show the tool `broken`") as caught:
        chat_template(template).render_prompt(request)
    assert caught.value.param == "tools"


# What came before stays


@pytest.mark.parametrize("need", sorted(NEEDS.keys() - {"system last", "first call only", "calls before text"}))
def test_each_prompt_continues_the_last_one(need: str) -> None:
    """Up to the end of the last message's text: a further text may join it."""
    shapes = ["su", "suTrr", "suTrrTrr", "suTrrTrra", "suTrrTrrau", "suTrrTrraucr", "suTrrTrraucrau"]
    texts = [render(NEEDS[need], history(shape)).text for shape in shapes]
    for before, after, shape in zip(texts, texts[1:], shapes, strict=False):
        last = history(shape).marks[-1]
        end = before.find(last) + len(last)
        assert common_prefix(before, after) >= end


REPLY = 'Well.\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'


@pytest.mark.parametrize("need", cases(NEEDS, [name for name in NEEDS if "," not in name][::2]))
def test_ten_turns_say_the_same_with_and_without_memory(need: str) -> None:
    processor, forgetful = (make_processor(tokenizer(NEEDS[need]), reasoning="none") for _ in range(2))
    session = Session(processor, messages=(system("Be kind."), user("Go."), user("Now.")), encode=canonical)
    for number in range(10):
        turn = session.answer(f"{REPLY}{REPLY[5:] * (number % 2)}<|im_end|>")
        session.give_results(*[f"done {number}"] * len(turn.reply.calls))
        if number % 3 == 0:
            session.ask(f"Be brief {number}.")
        prepared, fresh = session.prepare(), forgetful.prepare(session.request())
        decode = processor.tokenizer.decode
        assert "".join(decode(prepared.prompt.token_ids).split()) == "".join(decode(fresh.prompt.token_ids).split())


@pytest.mark.parametrize("need", ["no calls", "no calls, no results"])
def test_a_call_that_is_written_as_text_extends_the_reply_that_made_it(need: str) -> None:
    session = Session(make_processor(tokenizer(NEEDS[need]), reasoning="none"), messages=(user("Go."),))
    for _ in range(2):
        turn = session.answer(f"{REPLY}{REPLY[5:]}<|im_end|>")
        session.give_results("done", "done")
        assert session.prepare().prompt.token_ids[: len(turn.token_ids)] == turn.token_ids


def test_a_prefilled_reply_is_continued_behind_joined_turns() -> None:
    turns = (user("a"), user("b"), said("c"), said("Once upon"))
    request = Request(request_id="r", messages=turns, continue_final_message=True)
    text = chat_template(NEEDS["alternation"]).render_prompt(request).text
    assert text.endswith("<|im_start|>assistant\nc\n\nOnce upon")


# Templates of real models, from a folder


@pytest.mark.full
@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_real_templates_lose_nothing_in_silence(file: Path) -> None:
    template, draw = file.read_text(encoding="utf-8"), random.Random(0)
    faults: dict[str, Any] = {}
    for shape in (*SHAPES, *(random_shape(draw) for _ in range(100))):
        made = history(shape)
        for tools in (TOOLS, ()):
            try:
                faults[shape] = made.messages and made.fault(render(template, made, tools).text)
            except RequestError:
                continue
    assert {shape: fault for shape, fault in faults.items() if fault} == {}
