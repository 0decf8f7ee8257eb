"""System messages stand where the client put them, or as text of the message beside them; none moves to the front."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.tokenizers import TEMPLATES
from vllm_mlx.core.messages import Message, Role, TextPart, ToolCallPart, ToolResultPart
from vllm_mlx.core.request import Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.encoded import common_prefix
from vllm_mlx.prompt.template import ChatTemplate

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('begin with system') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
HOISTS = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPS = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
REMINDED = "<system-reminder>\nnote\n</system-reminder>"


@pytest.fixture
def render(qwen_folder: Path) -> Any:
    def render(template: str, *messages: Message) -> str:
        tokenizer = Tokenizer.load(qwen_folder, chat_template=template)
        return ChatTemplate(tokenizer).render_prompt(Request(request_id="r", messages=messages)).text

    return render


def say(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


BE_KIND, HI, NOTE, HELLO, MORE = (
    say("system", "be kind"),
    say("user", "hi"),
    say("system", "note"),
    say("assistant", "hello"),
    say("user", "more"),
)


def test_a_template_that_takes_them_gets_them_in_their_place(render: Any) -> None:
    text = render(PLAIN, BE_KIND, HI, NOTE, HELLO, MORE)
    assert text == "<system>be kind<user>hi<system>note<assistant>hello<user>more<go>"


@pytest.mark.parametrize("template", [FIRST_ONLY, HOISTS, DROPS])
def test_elsewhere_they_join_the_message_before(render: Any, template: str) -> None:
    text = render(template, BE_KIND, HI, NOTE, HELLO, MORE)
    assert text.endswith(f"be kind<user>hi\n{REMINDED}<assistant>hello<user>more")


@pytest.mark.parametrize("template", [FIRST_ONLY, HOISTS, DROPS, ALTERNATES])
def test_what_came_before_stays_the_start_of_the_prompt(render: Any, template: str) -> None:
    before = render(template, BE_KIND, HI, HELLO, MORE)
    after = render(template, BE_KIND, HI, HELLO, MORE, NOTE)
    assert after == f"{before}\n{REMINDED}"


def test_behind_a_reply_they_join_the_question_that_follows(render: Any) -> None:
    text = render(FIRST_ONLY, HI, HELLO, NOTE, MORE)
    assert text == f"<user>hi<assistant>hello<user>{REMINDED}\nmore"


def test_with_nothing_beside_them_they_are_a_turn_of_the_user(render: Any) -> None:
    assert render(FIRST_ONLY, HI, HELLO, NOTE) == f"<user>hi<assistant>hello<user>{REMINDED}"
    assert render(FIRST_ONLY, HI, HELLO, NOTE, HELLO).endswith(f"<assistant>hello<user>{REMINDED}<assistant>hello")


def test_several_at_the_start_are_one_where_one_is_taken(render: Any) -> None:
    assert render(FIRST_ONLY, BE_KIND, NOTE, HI) == "<system>be kind\nnote<user>hi"
    assert render(PLAIN, BE_KIND, NOTE, HI) == "<system>be kind<system>note<user>hi<go>"


REFUSES = {  # as templates of Gemma 2, of Mistral 7B and of DeepSeek's first models do
    "an error": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "silence": "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "turns that must alternate": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("template", REFUSES.values(), ids=REFUSES)
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ((BE_KIND, HI), "<user>be kind\nhi"),
        ((BE_KIND, HI, HELLO, MORE), "<user>be kind\nhi<assistant>hello<user>more"),
        ((BE_KIND,), "<user>be kind"),
        ((BE_KIND, HELLO, MORE), "<user>be kind<assistant>hello<user>more"),
        ((BE_KIND, HI, HELLO, MORE, NOTE), f"<user>be kind\nhi<assistant>hello<user>more\n{REMINDED}"),
    ],
)
def test_a_template_that_refuses_the_role_gets_a_message_of_the_user(
    render: Any, template: str, messages: tuple[Message, ...], text: str
) -> None:
    assert render(template, *messages) == text


def test_in_a_tool_loop_no_turn_is_added(render: Any) -> None:
    """A turn of the user would end the loop, and with it what templates keep of its reasoning."""
    call = Message("assistant", (ToolCallPart("call_1", "ls", {}),))
    result = Message("tool", (ToolResultPart("call_1", (TextPart("a.txt"),)),))
    text = render(ALTERNATES, HI, call, result, NOTE, HELLO, MORE)
    assert text == f"<user>hi<assistant>ls{{}}<tool>a.txt\n{REMINDED}<assistant>hello<user>more"


def test_the_real_templates(render: Any) -> None:
    conversation = (BE_KIND, HI, NOTE, HELLO, MORE)
    qwen = render((TEMPLATES / "qwen3.jinja").read_text(), *conversation)
    assert "<|im_end|>\n<|im_start|>system\nnote<|im_end|>\n<|im_start|>assistant" in qwen
    gemma = render((TEMPLATES / "gemma.jinja").read_text(), *conversation)
    assert f"be kind\n\nhi\n{REMINDED}<end_of_turn>" in gemma


def test_an_empty_one_leaves_no_trace(render: Any) -> None:
    assert render(FIRST_ONLY, HI, say("system", ""), HELLO, MORE) == "<user>hi<assistant>hello<user>more"


# Results that are errors

CALL = Message("assistant", (ToolCallPart("call_1", "ls", {}),))
SHOWS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% if m.role == 'tool' %}[{{ m.content }}]ERROR{% endif %}{% endfor %}"
)


def failed(text: str) -> Message:
    return Message("tool", (ToolResultPart("call_1", (TextPart(text),) if text else (), is_error=True),))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("No such file", "Error:\nNo such file"),
        ("", "Error:"),
        ("<tool_use_error>No such file</tool_use_error>", "<tool_use_error>No such file</tool_use_error>"),
        ("Exit code 1\nnothing", "Exit code 1\nnothing"),
    ],
)
def test_a_result_that_is_an_error_says_so(render: Any, text: str, shown: str) -> None:
    assert render(SHOWS.replace("ERROR", ""), HI, CALL, failed(text)) == f"ls{{}}[{shown}]"


def test_a_template_that_knows_errors_is_told(render: Any) -> None:
    template = SHOWS.replace("ERROR", "{{ m.is_error }}")
    assert render(template, HI, CALL, failed("No such file")) == "ls{}[No such file]True"


def test_a_later_error_changes_nothing_before_it(render: Any) -> None:
    well = Message("tool", (ToolResultPart("call_1", (TextPart("No such file"),)),))
    first, second = (render(PLAIN, HI, CALL, each) for each in (well, failed("No such file")))
    assert common_prefix(first, second) == first.find("No such file")
