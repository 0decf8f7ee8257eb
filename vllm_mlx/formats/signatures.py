"""What templates and vocabularies of each family hold, and the formats that this tells. Tables only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signature:
    """A format is spoken where the template has all of `template` and none of `unless`."""

    name: str
    template: tuple[str, ...]
    unless: tuple[str, ...] = ()

    def matches(self, template: str) -> bool:
        return all(part in template for part in self.template) and not any(part in template for part in self.unless)


# The first that matches counts, so the particular ones come first.
REASONING_SIGNATURES = (
    Signature("openai_gptoss", ("<|channel|>", "analysis")),
    Signature("gemma4", ("<|channel>", "<channel|>")),
    Signature("muse", ("to=self", "<|message|>")),
    Signature("inkling", ("<|content_thinking|>",)),
    Signature("plamo3", ("<|plamo:begin_think:plamo|>",)),
    Signature("k2_horizon", ("<ifm|think",)),
    Signature("kimi_k3", ("<|open|>think<|sep|>",)),
    Signature("kimi_k3", ("<|open|>", "<|sep|>", "think")),
    Signature("cohere_command3", ("<|START_THINKING|>",)),
    Signature("minimax_m3", ("<mm:think>",)),
    Signature("seed_oss", ("<seed:think>",)),
    Signature("longcat", ("<longcat_think>",)),
    Signature("apertus", ("<|inner_prefix|>",)),
    Signature("mistral", ("[THINK]",)),
    Signature("hy_v4", ("<think:",)),
    Signature("hunyuan_a13b", ("<think>", "<answer>")),
    Signature("ernie45", ("</think>", "<response>")),
    Signature("granite", ("Here is my thought process:",)),
    Signature("minimax_m2", ("<minimax:tool_call>", "<think>")),
    Signature("step3", ("<think>", "<｜tool_calls_begin｜>")),
    Signature("deepseek_r1", ("<｜Assistant｜>", "</think>"), unless=("thinking",)),
    Signature("qwen3", ("</think>",)),
    Signature("qwen3", ("<think>",)),
)
TOOL_SIGNATURES = (
    Signature("openai", ("<|channel|>", "to=functions")),
    Signature("openai", ("<|channel|>", "<|call|>")),
    Signature("gemma4", ("<|tool_call>", "<tool_call|>")),
    Signature("functiongemma", ("<start_function_call>",)),
    Signature("muse", ("<atem:function_calls>",)),
    Signature("inkling", ("<|content_invoke_tool_json|>",)),
    Signature("plamo3", ("<|plamo:begin_tool_request",)),
    Signature("k2_horizon", ("<ifm|tool_call",)),
    Signature("kimi_k3", ("<|open|>tools<|sep|>",)),
    Signature("kimi_k3", ("<|open|>", "<|sep|>", "tools")),
    Signature("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Signature("cohere_command3", ("<|START_ACTION|>",)),
    Signature("minimax_m3", ("]<]minimax[>[",)),
    Signature("minimax_m2", ("<minimax:tool_call>",)),
    Signature("dots", ("<dots_function_call>",)),
    Signature("deepseek_v41", ("｜DSML｜ calls",)),
    Signature("deepseek_v4", ("｜DSML｜", "tool_calls"), unless=("function_calls",)),
    Signature("deepseek_v32", ("｜DSML｜",)),
    Signature("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    Signature("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    Signature("step3", ("<steptml:invoke",)),
    Signature("seed_oss", ("<seed:tool_call>",)),
    Signature("longcat", ("<longcat_tool_call>",)),
    Signature("apertus", ("<|tools_prefix|>",)),
    Signature("internlm", ("<|action_start|>",)),
    Signature("gigachat3", ("<|function_call|>",)),
    Signature("gigachat3", ("function call<|role_sep|>",)),
    Signature("minicpm5", ('<function name="', "<param name=")),
    Signature("phi4_mini_json", ("functools[",)),
    Signature("hy_v3", ("<tool_sep>",)),
    Signature("glm45", ("<arg_key>",)),
    Signature("llama4_pythonic", ("<|python_start|>",)),
    Signature("lfm2", ("<|tool_call_start|>",)),
    Signature("lfm2", ("<|tool_list_start|>",)),
    Signature("olmo3", ("<function_calls>",)),
    Signature("mistral", ("[TOOL_CALLS]",)),
    Signature("granite", ("<|tool_call|>",)),
    Signature("granite-20b-fc", ("<function_call>",)),
    Signature("hunyuan_a13b", ("<tool_calls>",)),
    Signature("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    Signature("hermes", ("<tool_call>",)),
    Signature("llama3_json", ("<|python_tag|>",)),
    Signature("llama3_json", ('"parameters": ', "<|start_header_id|>")),
    Signature("pythonic", ("func_name1(params_name1",)),
)
# What the vocabulary tells where the template tells nothing. Tool tags of a vocabulary tell little: many tokenizers
# hold some that their model never learnt to use.
REASONING_TOKENS = (
    ("qwen3", ("<think>", "</think>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("longcat", ("<longcat_think>", "</longcat_think>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("openai_gptoss", ("<|channel|>", "<|message|>", "<|constrain|>")),
)
TOOL_TOKENS = (
    ("openai", ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")),
    ("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>")),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
)
