"""What chat templates are given, and what happens when they refuse it."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.rows import row
from vllm_mlx.core.errors import TemplateError, Unsupported
from vllm_mlx.core.messages import (
    ImagePart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    ToolSpec,
)
from vllm_mlx.core.request import RESERVED_TEMPLATE_KWARGS, Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.template import ChatTemplate, MediaMarkers
from vllm_mlx.prompt.template_messages import apart, template_messages

USER = Message("user", (TextPart("hi"),))
WEATHER = ToolSpec("get_weather", "Weather.", {"type": "object", "properties": {"city": {"type": "string"}}})


def render(tokenizer: Tokenizer, *messages: Message, enable_thinking: bool | None = None, **options: Any) -> str:
    request = Request(request_id="r", messages=messages, **options)
    return ChatTemplate(tokenizer, enable_thinking=enable_thinking).render_prompt(request).text


@pytest.fixture
def with_template(qwen_folder: Path):
    return lambda text: Tokenizer.load(qwen_folder, chat_template=text)


def test_text_alone_is_a_string_however_it_was_sent() -> None:
    assert template_messages([USER]) == [{"role": "user", "content": "hi"}]
    two = Message("system", (TextPart("a"), TextPart("b")))
    assert template_messages([two]) == [{"role": "system", "content": "a\nb"}]


@row("S0-16")
def test_assistant_message_keeps_its_white_space_reasoning_and_arguments() -> None:
    message = Message(
        "assistant",
        (
            ReasoningPart("\n hm\n"),
            TextPart(" one\n"),
            ToolCallPart("c1", "f", {"b": [1], "a": None}),
            TextPart("two "),
        ),
    )
    assert template_messages([message]) == [
        {
            "role": "assistant",
            "content": " one\ntwo ",
            "reasoning_content": "\n hm\n",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": [1], "a": None}}}
            ],
        }
    ]


def test_tool_results_are_messages_of_their_own() -> None:
    message = Message(
        "user",
        (
            ToolResultPart("c1", (TextPart("sunny"),), name="get_weather"),
            ToolResultPart("c2", (TextPart("a"), TextPart("b"))),
            TextPart("and now?"),
        ),
    )
    assert template_messages([*apart([message])]) == [
        {"role": "tool", "tool_call_id": "c1", "content": "sunny", "name": "get_weather"},
        {"role": "tool", "tool_call_id": "c2", "content": "a\nb"},
        {"role": "user", "content": "and now?"},
    ]


def test_images_make_a_list() -> None:
    message = Message("user", (ImagePart("data:,"), TextPart("what?")), name="ann")
    assert template_messages([message]) == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}], "name": "ann"}
    ]


def test_message_without_parts_is_kept() -> None:
    assert template_messages([Message("assistant", ())]) == [{"role": "assistant", "content": ""}]


@row("S4-21")
def test_conversation_with_tools(qwen: Tokenizer) -> None:
    text = render(
        qwen,
        Message("system", (TextPart("Be kind."),)),
        USER,
        Message("assistant", (ReasoningPart("hm"), ToolCallPart("c1", "get_weather", {"city": "Rome"}))),
        Message("tool", (ToolResultPart("c1", (TextPart("sunny"),)),)),
        tools=(WEATHER,),
    )
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n\n<tools>\n" + '{"type": "function", "function":')
    assert text.endswith(
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_are_not_rendered_when_none_may_be_called(qwen: Tokenizer) -> None:
    without = render(qwen, USER)
    assert render(qwen, USER, tools=(WEATHER,), tool_choice=ToolChoice("none")) == without
    assert render(qwen, USER, tools=(WEATHER,)) != without


SAYS = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
NEVER = "{% if tools %}{% set x = tools | tojson %}{% endif %}" + SAYS
WITH_SYSTEM = "{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}" + SAYS
TO_QUESTIONS = "{% if messages[-1].role == 'user' %}{{ tools | tojson }}{% endif %}" + SAYS
WITHOUT_NAMES = "{% if tools %}{{ tools | length }} tools{% endif %}" + SAYS
OTHERS_FORM = "{% for tool in tools or [] %}{{ tool.function.name | upper }}{% endfor %}" + SAYS
REFUSES = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + SAYS
SYSTEM = Message("system", (TextPart("get_weather"),))


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (SAYS, [USER]),
        (NEVER, [SYSTEM, USER]),
        (WITH_SYSTEM, [Message("user", (TextPart("get_weather"),))]),
        (SAYS, [USER, Message("assistant", (TextPart("a"),)), Message("tool", (TextPart("get_weather"),))]),
    ],
)
def test_tools_that_the_template_does_not_show_are_refused(with_template, template, messages) -> None:
    tokenizer = with_template(template)
    assert render(tokenizer, *messages)
    with pytest.raises(Unsupported, match="does not show `tools`") as caught:
        render(tokenizer, *messages, tools=(WEATHER,))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (WITH_SYSTEM, [SYSTEM, USER]),
        (TO_QUESTIONS, [USER]),
        (TO_QUESTIONS, [USER, Message("assistant", (TextPart("a"),)), Message("tool", (TextPart("b"),))]),
        (WITHOUT_NAMES, [USER]),
        (OTHERS_FORM, [USER]),
    ],
)
def test_tools_that_the_template_shows_in_its_way_are_taken(with_template, template, messages) -> None:
    assert render(with_template(template), *messages, tools=(WEATHER,))


@pytest.mark.parametrize(
    ("template", "is_shown"),
    [(SAYS, False), (NEVER, False), (REFUSES, False), (WITH_SYSTEM, True), (OTHERS_FORM, True)],
)
def test_a_model_takes_tools_if_its_template_shows_them(with_template, template: str, is_shown: bool) -> None:
    assert ChatTemplate(with_template(template)).shows_tools is is_shown


@row("S0-19")
@pytest.mark.parametrize(
    ("server", "thinking", "kwargs", "expected"),
    [
        (None, "auto", {}, "True"),
        (False, "auto", {}, "False"),
        (False, "on", {}, "True"),
        (None, "off", {}, "False"),
        (None, "on", {"enable_thinking": False}, "False"),
    ],
)
def test_thinking_is_on_unless_told_otherwise(with_template, server, thinking, kwargs, expected) -> None:
    tokenizer = with_template("{{ enable_thinking }}")
    assert render(tokenizer, USER, enable_thinking=server, thinking=thinking, template_kwargs=kwargs) == expected


def test_template_kwargs_reach_the_template(with_template) -> None:
    tokenizer = with_template("{{ reasoning_effort }} {{ add_generation_prompt }}")
    options = {"template_kwargs": {"reasoning_effort": "low"}, "add_generation_prompt": False}
    assert render(tokenizer, USER, **options) == "low False"


def test_every_argument_of_the_library_s_own_is_reserved() -> None:
    parameters = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD} - {"self"}
    assert names <= RESERVED_TEMPLATE_KWARGS


def test_final_message_is_continued(qwen: Tokenizer) -> None:
    text = render(qwen, USER, Message("assistant", (TextPart("Once upon"),)), continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")


def test_missing_template_is_said(qwen_folder: Path, llama: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        render(llama, USER)


@pytest.mark.parametrize("damaged", ["", " \n", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_template_that_writes_no_messages_is_none(with_template, damaged: str) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        render(with_template(damaged), USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('Roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_template_that_fails_is_a_clear_error(with_template, template: str) -> None:
    with pytest.raises(TemplateError) as raised:
        render(with_template(template), USER)
    assert raised.value.message.startswith("The model's chat template cannot take this conversation: ")
    assert "\n" not in raised.value.message
    assert raised.value.param == "messages"


# Templates that take calls in ways of their own

ASKED = (
    USER,
    Message("assistant", (ToolCallPart("call_0123456789", "get_weather", {"city": "Rome", "n": [1, None]}),)),
    Message("tool", (ToolResultPart("call_0123456789", (TextPart("sunny"),)),)),
)
LOOP = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}BODY{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.name }}={{ m.content }}{% endif %}{% endfor %}"
)


@row("S4-22")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ c.function.name }}{{ c.function.arguments | tojson }}", 'get_weather{"city": "Rome", "n": [1, null]}'),
        ("{{ c.function.name + c.function.arguments }}", 'get_weather{"city": "Rome", "n": [1, null]}'),
        ("{{ c.function.name }}{{ c.function.arguments }}", 'get_weather{"city": "Rome", "n": [1, null]}'),
        (
            "{{ c.function.name }}{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}",
            "get_weather<city>Rome<n>[1, None]",
        ),
        (
            "{% if c.function.arguments is string %}{{ raise_exception('no text') }}{% endif %}{{ c.function.name }}"
            "{{ c.function.arguments | tojson }}",
            'get_weather{"city": "Rome", "n": [1, null]}',
        ),
    ],
)
def test_arguments_are_objects_or_text_as_the_template_takes_them(with_template, body: str, expected: str) -> None:
    text = render(with_template(LOOP.replace("BODY", body)), *ASKED)
    assert text == expected + "get_weather=sunny"


def test_calls_that_a_template_shows_without_content_only(with_template) -> None:
    body = "{% if m.content is not defined %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endif %}"
    assert render(with_template(LOOP.replace("BODY", body)), *ASKED).startswith("get_weather{")


def test_ids_of_nine_letters_where_a_template_insists(with_template) -> None:
    body = (
        "{% if c.id | length != 9 %}{{ raise_exception('length 9') }}{% endif %}{{ c.id }} {{ c.function.name }}"
        "{{ c.function.arguments | tojson }}"
    )
    tokenizer = with_template(LOOP.replace("BODY", body))
    first = render(tokenizer, *ASKED).split()[0]
    assert len(first) == 9
    assert render(tokenizer, *ASKED).split()[0] == first
    kept = Message("assistant", (ToolCallPart("abcDEF123", "get_weather", {}),))
    assert render(tokenizer, USER, kept).startswith("abcDEF123 ")


@pytest.mark.parametrize(
    ("server", "thinking", "expected"),
    [
        (None, "auto", "unset"),
        (None, "on", "True"),
        (True, "auto", "True"),
        (False, "auto", "False"),
        (True, "off", "False"),
    ],
)
def test_a_template_that_knows_thinking_by_another_name(with_template, server, thinking, expected) -> None:
    tokenizer = with_template("{% if thinking is defined %}{{ thinking }}{% else %}unset{% endif %}")
    assert render(tokenizer, USER, enable_thinking=server, thinking=thinking) == expected


MARKERS = MediaMarkers("<I>", "<V>")


def test_markers_become_the_medias_texts_in_order() -> None:
    rendered = MARKERS.fill_in("a <I> b <V>.", [("<I>", "111"), ("<V>", "2")])
    assert rendered is not None
    assert rendered.text == "a 111 b 2."
    assert [rendered.text[start:][:1] for start in rendered.media_starts] == ["1", "2"]


def test_a_marker_that_the_conversation_says_stays_text() -> None:
    messages = MARKERS.escape([{"content": "what is <I>?", "n": 1}, {"content": [{"text": "<V>"}]}])
    said = f"{messages[0]['content']} <I> {messages[1]['content'][0]['text']}"
    rendered = MARKERS.fill_in(said, [("<I>", "###")])
    assert rendered is not None
    assert rendered.text == "what is <I>? ### <V>"
    assert rendered.media_starts == (13,)
    assert messages[0]["n"] == 1


def test_a_template_that_leaves_an_image_out_is_noticed() -> None:
    assert MARKERS.fill_in("a <I> b", [("<I>", "1"), ("<I>", "2")]) is None
    assert MARKERS.fill_in("a b", [("<I>", "1")]) is None
    assert MARKERS.fill_in("a <V> b <I>", [("<I>", "1"), ("<V>", "2")]) is None
    assert MediaMarkers("<I>").fill_in("a <V>", [("<V>", "1")]) is None
