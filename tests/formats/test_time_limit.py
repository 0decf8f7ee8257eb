"""Templates are programs of strangers: they end in time, write within bounds, and reach nothing."""

import contextlib
import gc
import subprocess
import sys
import threading
import time

import pytest

from vllm_mlx.core.errors import TemplateError
from vllm_mlx.core.messages import Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.formats import tokenizer as tokenizer_module
from vllm_mlx.formats.tokenizer import OutOfTime, Tokenizer, time_limit
from vllm_mlx.prompt.template import ChatTemplate

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MACRO = "{% macro say(message) %}{{ message.content }}{% endmacro %}{{ say(messages[0]) }}"
REQUEST = Request(request_id="r", messages=(Message("user", (TextPart("hi"),)),))


def render(checkpoint, template: str) -> str:
    return ChatTemplate(Tokenizer.load(checkpoint("qwen3"), chat_template=template)).render_prompt(REQUEST).text


def test_an_endless_loop_ends_and_the_thread_lives_on(checkpoint, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "TEMPLATE_S", 0.3)
    with pytest.raises(TemplateError, match=r"took more than 0\.3 seconds"):
        render(checkpoint, ENDLESS)
    assert render(checkpoint, "{{ messages[0].content }}") == "hi"


def test_too_much_output_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_RENDERED_CHARS", 1000)
    assert len(render(checkpoint, "{{ 'x' * 1000 }}")) == 1000
    with pytest.raises(TemplateError, match="more than 1000 characters"):
        render(checkpoint, "{{ 'x' * 1001 }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{{ 'x' * 10 ** 17 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_what_a_template_must_not_do_is_the_request_s_error(checkpoint, template):
    with pytest.raises(TemplateError, match="cannot take this conversation"):
        render(checkpoint, template)


@pytest.mark.parametrize("seconds", [0.0, 0.00005, 0.0002, 0.001])
def test_no_exception_comes_after_the_block(seconds):
    for _ in range(200):
        with contextlib.suppress(OutOfTime), time_limit(seconds):
            sum(range(100))
        sum(range(1000))  # a late exception would come here, or
    time.sleep(0.05)  # here


PROFILED = """
import cProfile
from vllm_mlx.formats.tokenizer import OutOfTime, time_limit

try:
    with time_limit({seconds}):
        while {seconds} < 1:
            pass
except OutOfTime:
    print("out of time")
profile = cProfile.Profile()
profile.enable()
(lambda: None)()
profile.disable()
print("profiled")
"""


@pytest.mark.parametrize(("seconds", "printed"), [(10, ["profiled"]), (0.01, ["out of time", "profiled"])])
def test_code_after_a_limit_can_be_profiled(seconds, printed):
    code = PROFILED.format(seconds=seconds)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert result.stdout.split("\n")[:-1] == printed


def test_code_around_its_limit_ends_in_one_of_two_ways():
    outcomes = set()

    def work() -> None:
        for _ in range(100):
            try:
                with time_limit(0.002):
                    until = time.monotonic() + 0.002
                    while time.monotonic() < until:
                        pass
                outcomes.add("in time")
            except OutOfTime:
                outcomes.add("late")
        outcomes.add("alive")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert "alive" in outcomes


def test_a_render_leaves_no_conversation_to_the_garbage_collector(checkpoint):
    """A template with macros leaves a cycle behind, which holds its variables until the next full collection."""
    tokenizer = Tokenizer.load(checkpoint("qwen3"), chat_template=MACRO)
    text = "a text " * 1000
    before = sys.getrefcount(text)
    gc.disable()
    try:
        assert tokenizer.apply_chat_template([{"role": "user", "content": text}]) == text
        assert sys.getrefcount(text) == before
    finally:
        gc.enable()
