"""Whatever is said, through whichever template: a prompt, or a refusal in words. Nothing else comes out."""

from functools import cache
from operator import attrgetter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.drawing import examples
from vllm_mlx.core.errors import RequestError
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart, ToolCallPart, ToolChoice, ToolResultPart, ToolSpec
from vllm_mlx.core.request import RESERVED_TEMPLATE_KWARGS, Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.processor import RequestProcessor
from vllm_mlx.runner.checkpoint import DEMO_PATH

from .template_variants import TEMPLATE_VARIANTS
from .turns import make_processor

_EACH = "{%- for message in messages -%}BODY{%- endfor -%}"
HOSTILE = {
    "expects a list": _EACH.replace("BODY", "{{- message.content[0].text -}}"),
    "expects a third turn": "{{- messages[2].content -}}",
    "expects arguments": _EACH.replace("BODY", "{{- message.tool_calls[0].function.arguments.path | upper -}}"),
    "adds what cannot be added": _EACH.replace("BODY", "{{- message.content + message.tool_calls -}}"),
    "compares what cannot be compared": _EACH.replace("BODY", "{{- message.content | sort -}}{{- message < 1 -}}"),
    "divides by their number": "{{- 1 // (messages | length - 2) -}}",
    "repeats itself": "{%- macro again(m) -%}{{- again(m) -}}{%- endmacro -%}{{- again(messages) -}}",
    "refuses": "{{- raise_exception('no:\n' + messages[-1].content) -}}",
    "calls what was said": "{{- messages[-1].content() -}}",
    "shows nothing": "",
    "shows the client's variables": "{{- mine.a.b -}}{{- mine | tojson -}}",
    "formats with what was said": "{{- messages[-1].content.format(messages) -}}",
    "fills in what was said": "{{- messages[-1].content % messages -}}",
}
TEMPLATES = {**TEMPLATE_VARIANTS, **HOSTILE, "demo": (DEMO_PATH / "chat_template.jinja").read_text()}
SAID = ["<|im_start|>", "<|im_end|>", "</think>", "<tool_call>\n", "{{ 7 * 7 }}", "{% for", "{0.__class__}", "%s %d %",
        "\0", "\u202e", "🙂", "é東", "\n", "<|image_pad|>", "a " * 50]  # fmt: skip
TEXTS = st.lists(st.sampled_from(SAID) | st.text(max_size=8), max_size=4).map("".join)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)
PARTS = st.one_of(
    st.builds(TextPart, TEXTS),
    st.builds(TextPart, TEXTS),
    st.builds(ReasoningPart, TEXTS),
    st.builds(ToolCallPart, TEXTS, TEXTS, OBJECTS),
    st.builds(
        ToolResultPart,
        TEXTS,
        st.lists(st.builds(TextPart, TEXTS), max_size=2).map(tuple),
        st.none() | TEXTS,
        st.booleans(),
    ),
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.lists(PARTS, max_size=3).map(tuple),
    st.none() | TEXTS,
)
REQUESTS = st.builds(
    Request,
    request_id=st.just("r"),
    messages=st.lists(MESSAGES, max_size=5).map(tuple),
    tools=st.lists(
        st.builds(ToolSpec, TEXTS, st.none() | TEXTS, st.none() | OBJECTS), max_size=2, unique_by=attrgetter("name")
    ).map(tuple),
    tool_choice=st.sampled_from([ToolChoice(), ToolChoice("none")]),
    thinking=st.sampled_from(["auto", "on", "off"]),
    template_kwargs=st.dictionaries(
        st.sampled_from(["mine", "enable_thinking"]) | TEXTS.filter(lambda name: name not in RESERVED_TEMPLATE_KWARGS),
        VALUES,
        max_size=2,
    ),
    add_generation_prompt=st.booleans(),
    continue_final_message=st.booleans(),
)


@cache
def hf_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_PATH)


@cache
def processor(template: str) -> RequestProcessor:
    return make_processor(Tokenizer(hf_tokenizer(), chat_template=TEMPLATES[template]))


@settings(max_examples=examples(40))
@given(st.sampled_from(sorted(TEMPLATES)), REQUESTS)
def test_any_conversation_is_a_prompt_or_refused(template: str, request: Request) -> None:
    try:
        prepared = processor(template).prepare(request)
    except RequestError as error:
        assert error.message
    else:
        assert prepared.prompt.token_ids
