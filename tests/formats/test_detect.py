"""Formats are found from templates and vocabularies shaped like those of the families."""

from pathlib import Path

import pytest

from tests.support.rows import row
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.formats import detect_formats
from vllm_mlx.formats.families import FAMILIES as ROWS
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.reply_formats import check_parsers, reply_formats

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


@row("S0-8")
@pytest.mark.parametrize(
    ("template", "vocabulary", "expected"),
    [
        (QWEN3, THINK_TOKENS, ("qwen3", "hermes")),
        (QWEN3_5, THINK_TOKENS, ("qwen3", "qwen3_xml")),
        (QWEN3_CODER, {"<tool_call>"}, (None, "qwen3_xml")),
        (QWEN2_5, {"<tool_call>"}, (None, "hermes")),
        (QWQ, THINK_TOKENS, ("qwen3", "hermes")),
        (DEEPSEEK_R1, THINK_TOKENS, ("deepseek_r1", "deepseek_v31")),
        (GLM, THINK_TOKENS, ("qwen3", "glm45")),
        (LLAMA, set(), (None, None)),
        (LLAMA, THINK_TOKENS, ("qwen3", None)),
        ("{# a <tool_call> that no model reads #}hi", set(), (None, None)),
        (None, set(), (None, None)),
    ],
)
def test_detected_formats(template: str | None, vocabulary: set[str], expected: tuple[str | None, str | None]) -> None:
    assert detect_formats(template, vocabulary) == expected


# Shapes of the families' templates, each as short as what tells it apart.
FAMILIES = {
    "DeepSeek V3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ tool['type'] }}<｜tool▁sep｜>"
        "{{ name }}\n```json\n{{ args }}\n```<｜tool▁call▁end｜><｜Assistant｜>",
        (None, "deepseek_v3"),
    ),
    "DeepSeek V3.1": (
        "{% if thinking %}<｜Assistant｜><think>{% else %}<｜Assistant｜></think>{% endif %}"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ args }}",
        ("qwen3", "deepseek_v31"),
    ),
    "DeepSeek V3.2": ("<｜Assistant｜></think>{% if thinking %}<｜DSML｜function_calls>", ("qwen3", "deepseek_v32")),
    "DeepSeek V4": ("</think>{% if thinking_mode %}<｜DSML｜tool_calls><｜DSML｜invoke", ("qwen3", "deepseek_v4")),
    "DeepSeek V4.1": ("</think>{% if thinking_mode %}<｜DSML｜ calls><｜DSML｜ invoke", ("qwen3", "deepseek_v41")),
    "GLM 4.7": ("<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key><arg_value></think>", ("qwen3", "glm45")),
    "Hunyuan V3": ("<tool_calls>\n<tool_call>{{ n }}<tool_sep>\n<arg_key></think>", ("qwen3", "hy_v3")),
    "Hunyuan A13B": ("<think>\n\n</think>\n<answer>\n<tool_calls>[", ("hunyuan_a13b", "hunyuan_a13b")),
    "Jamba": ("{% if tools %}<tool_calls>[", (None, "hunyuan_a13b")),
    "Kimi K2 Thinking": ("<|tool_calls_section_begin|><think></think>", ("qwen3", "kimi_k2")),
    "Kimi K3": ("<|open|>think<|sep|>{{ r }}<|close|>think<|sep|><|open|>tools<|sep|>", ("kimi_k3", "kimi_k3")),
    "MiniMax M2": ("<minimax:tool_call>\n<invoke name=]~b]ai\n<think>\n", ("minimax_m2", "minimax_m2")),
    "MiniMax M3": ("]<]minimax[>[<tool_call><mm:think>", ("minimax_m3", "minimax_m3")),
    "gpt-oss": (
        "<|start|>assistant<|channel|>analysis<|message|>{{ t }}<|end|>to=functions.{{ n }}<|channel|>commentary json"
        "<|message|><|call|>",
        ("openai_gptoss", "openai"),
    ),
    "Mistral Small": ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS] [", (None, "mistral")),
    "Magistral": ("[THINK]{{ t }}[/THINK][TOOL_CALLS]{{ name }}[ARGS]", ("mistral", "mistral")),
    "Llama 3.1": ('<|start_header_id|>{"name": function name, "parameters": dictionary}', (None, "llama3_json")),
    "Llama 4": ("<|header_start|>assistant<|python_start|>[", (None, "llama4_pythonic")),
    "Gemma 4": ("<|channel>thought\n<channel|><|tool_call>call:{{ n }}{<tool_call|>", ("gemma4", "gemma4")),
    "FunctionGemma": ("<start_function_call>call:{{ name }}{<escape>", (None, "functiongemma")),
    "Granite 3": ("Here is my thought process: <|tool_call|>", ("granite", "granite")),
    "Granite 4": ('<tool_call>\n{"name": {{ n }}, "arguments":}</tool_call>', (None, "hermes")),
    "LFM2": ("{{ '<|tool_list_start|>' }}{{ tools }}", (None, "lfm2")),
    "OLMo 3": ("<think><function_calls>{{ f }}</function_calls>", ("qwen3", "olmo3")),
    "Seed OSS": ("<seed:think><seed:tool_call>\n<function=", ("seed_oss", "seed_oss")),
    "Step3": ("<think>\n<｜tool_calls_begin｜><steptml:invoke name=", ("step3", "step3")),
    "InternLM": ("<|action_start|><|plugin|>", (None, "internlm")),
    "Phi-4 mini": ("functools[{", (None, "phi4_mini_json")),
    "LongCat": ("<longcat_tool_call><longcat_think>", ("longcat", "longcat")),
    "Apertus": ("<|inner_prefix|><|tools_prefix|>[{", ("apertus", "apertus")),
    "GigaChat 3": ("<|message_sep|>\n\nfunction call<|role_sep|>\n", (None, "gigachat3")),
    "GigaChat 3 with names": (
        "{% set role = 'function call' %}{% set role_sep = '<|role_sep|>' %}",
        (None, "gigachat3"),
    ),
    "Hunyuan 3": (
        "{% set HY = ':opensource' %}<tool_calls{{ HY }}><tool_sep{{ HY }}><think{{ HY }}>",
        ("hy_v4", "hy_v3"),
    ),
    "Nemotron Nano 2": ("<think></think><TOOLCALL>[{{ calls }}]</TOOLCALL>", ("qwen3", "nemotron_nano_v2")),
    "Apriel 1.6": ("Here are my reasoning steps:\n[BEGIN FINAL RESPONSE]<tool_calls>[", ("apriel", "hunyuan_a13b")),
    "MiniCPM5": ('<think><function name="{{ n }}"><param name="', ("qwen3", "minicpm5")),
    "dots": ("<dots_function_call><invoke name=", (None, "dots")),
    "K2 Horizon": ("<ifm|think_fast><ifm|tool_calls>", ("k2_horizon", "k2_horizon")),
    "Inkling": ("<|message_model|><|content_thinking|><|content_invoke_tool_json|>", ("inkling", "inkling")),
    "PLaMo 3": ("<|plamo:begin_think:plamo|><|plamo:begin_tool_requests:plamo|>", ("plamo3", "plamo3")),
    "Muse": ("assistant to=self<|message|><|eom|><atem:function_calls>", ("muse", "muse")),
    "Command A": ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>", ("cohere_command3", "cohere_command3")),
    "ERNIE 4.5": ("<think>\n</think>\n<response>\n<tool_call>\n{", ("ernie45", "hermes")),
    "Nemotron 3": ("<think></think><tool_call>\n<function=x>\n<parameter=y>", ("qwen3", "qwen3_xml")),
    "Nemotron 3 Super": (
        "{% if truncate_history_thinking %}<think></think><tool_call>\n<function=x>\n<parameter=y>",
        ("nemotron_v3", "qwen3_xml"),
    ),
    "tools shown in an unknown way": ("{% if tools %}{{ tools | tojson }}{% endif %}", (None, "generic")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_told_apart(family: str) -> None:
    template, expected = FAMILIES[family]
    assert detect_formats(template, set()) == expected


def test_the_vocabulary_tells_what_the_template_does_not() -> None:
    shows_tools = "{% if tools %}{{ tools }}{% endif %}"
    harmony = {"<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"}
    assert detect_formats(shows_tools, harmony) == ("openai_gptoss", "openai")
    assert detect_formats(shows_tools, {"<|tool_call_start|>", "<|tool_call_end|>"}) == (None, "lfm2")
    assert detect_formats("", {"<|tool_call_start|>", "<|tool_call_end|>"}) == (None, None)


def test_no_row_is_recognised_by_what_it_does_not_have() -> None:
    for one in ROWS:
        assert one.reasoning is not None or not (one.reasoning_signs or one.reasoning_tokens), one.name
        assert one.calls is not None or not (one.call_signs or one.call_tokens), one.name


def test_a_name_belongs_to_one_row() -> None:
    reasoning = [name for one in ROWS if one.reasoning is not None for name in one.reasoning_choices]
    calls = [name for one in ROWS if one.calls is not None for name in one.call_choices]
    assert len(reasoning) == len(set(reasoning)) and len(calls) == len(set(calls))


VLLM_REASONING = """
    deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4
    glm45 glm47 ling3 openai_gptoss granite granite_thinking_parser hf beam holo2 hunyuan_a13b hy_v3 hy_v4
    kimi_k2 kimi_k3 k2_horizon mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral nemotron_v3
    olmo3 plamo3 muse muse_glimmer musespark1x qwen3 seed_oss step3 step3p5 step5 inkling
"""
SGLANG_REASONING = """
    apertus2509 beam deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots glm45 ling3 hunyuan gpt-oss
    k2_horizon kimi kimi_k2 kimi_k3 mimo muse poolside_v1 qwen3 qwen3-thinking minimax minimax-append-think
    minimax-m3 nanbeige step3 step3p5 mistral nemotron_3 granite_thinking_parser interns1 gemma4 gigachat35
    inkling iquest_q1 cohere_command4 response_template gpt_oss harmony glm4
"""
VLLM_TOOLS = """
    dots deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 cohere_command3 cohere_command4 ernie45
    glm45 glm47 ling3 granite-20b-fc granite granite4 hermes hf beam poolside_v1 hunyuan_a13b hy_v3 hy_v4
    internlm jamba lfm2 kimi_k2 kimi_k3 k2_horizon llama3_json llama4_json llama4_pythonic longcat mimo
    minimax_m2 minimax_m3 minicpm5 mistral olmo3 plamo3 muse muse_glimmer musespark1x openai phi4_mini_json
    pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 step5 inkling xlam gigachat3 functiongemma
    gemma4 apertus nemotron_v3
"""


@pytest.mark.parametrize("name", [*VLLM_REASONING.split(), *SGLANG_REASONING.split()])
def test_reasoning_names_of_other_servers_are_taken(name: str) -> None:
    check_parsers(EngineConfig(model="m", reasoning_parser=name))


@pytest.mark.parametrize("name", VLLM_TOOLS.split())
def test_tool_names_of_other_servers_are_taken(name: str) -> None:
    check_parsers(EngineConfig(model="m", tool_call_parser=name))


@row("S0-8")
def test_the_users_choice_wins(qwen_folder: Path) -> None:
    tokenizer = Tokenizer.load(qwen_folder, chat_template=QWEN3)

    def resolve(reasoning: str, tools: str) -> tuple[str | None, str | None]:
        config = EngineConfig(model="m", reasoning_parser=reasoning, tool_call_parser=tools)
        found = reply_formats(config, tokenizer)
        return found.reasoning_name, found.calls_name

    assert resolve("auto", "auto") == ("qwen3", "hermes")
    assert resolve("none", "none") == (None, None)
    assert resolve("deepseek_r1", "qwen3_coder") == ("deepseek_r1", "qwen3_coder")
    with pytest.raises(ConfigError, match=r"--tool-call-parser .* hermes"):
        resolve("auto", "no_such_parser")
