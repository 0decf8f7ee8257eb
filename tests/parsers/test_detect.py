"""Formats are found from templates and vocabularies shaped like those of the families."""

import pytest

from vllm_mlx.core.errors import ConfigError
from vllm_mlx.parsers import detect_formats, reasoning_markers, resolve_formats

QWEN3 = (
    "{%- if tools %}<tools></tools>\nreturn <tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}'
    "{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN3_5 = (
    "<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>"
    "{% if '</think>' in content %}{% endif %}<|im_start|>assistant\n<think>\n"
)
QWEN3_CODER = "<tool_call>\n<function=f>\n<parameter=p>\n1\n</parameter>\n</function>\n</tool_call>"
QWEN2_5 = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_start|>assistant\n'
QWQ = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_start|>assistant\n<think>\n'
DEEPSEEK_R1 = "{% if '</think>' in content %}{% endif %}<｜tool▁calls▁begin｜><｜Assistant｜><think>\\n"
GLM = "<tool_call>{{ name }}<arg_key>k</arg_key><arg_value>v</arg_value></tool_call><think></think>"
LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
THINK_TOKENS = {"<think>", "</think>", "<tool_call>"}


@pytest.mark.parametrize(
    ("template", "vocabulary", "expected"),
    [
        (QWEN3, THINK_TOKENS, ("qwen3", "hermes")),
        (QWEN3_5, THINK_TOKENS, ("qwen3", "qwen3_xml")),
        (QWEN3_CODER, {"<tool_call>"}, (None, "qwen3_xml")),
        (QWEN2_5, {"<tool_call>"}, (None, "hermes")),
        (QWQ, THINK_TOKENS, ("qwen3", "hermes")),
        (DEEPSEEK_R1, THINK_TOKENS, ("deepseek_r1", None)),
        (GLM, THINK_TOKENS, ("qwen3", None)),
        (LLAMA, set(), (None, None)),
        (LLAMA, THINK_TOKENS, ("qwen3", None)),
        ("{# a <tool_call> that no model reads #}hi", set(), (None, None)),
        (None, set(), (None, None)),
    ],
)
def test_detected_formats(template: str | None, vocabulary: set[str], expected: tuple[str | None, str | None]) -> None:
    assert detect_formats(template, vocabulary) == expected


def test_the_users_choice_wins() -> None:
    def resolve(reasoning: str, tools: str) -> tuple[str | None, str | None]:
        return resolve_formats(reasoning, tools, chat_template=QWEN3, vocabulary=THINK_TOKENS)

    assert resolve("auto", "auto") == ("qwen3", "hermes")
    assert resolve("none", "none") == (None, None)
    assert resolve("deepseek_r1", "qwen3_coder") == ("deepseek_r1", "qwen3_coder")
    with pytest.raises(ConfigError, match=r"--tool-call-parser .* hermes"):
        resolve("auto", "no_such_parser")


def test_markers_of_a_reasoning_format() -> None:
    assert reasoning_markers("qwen3") == ("<think>", "</think>")
