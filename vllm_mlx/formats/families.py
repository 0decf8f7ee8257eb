"""The model families: one row describes the reading, writing and detection of a family's reasoning and tool calls.

To add a family, add its row. A checkpoint speaks the formats of the first row with a signature that matches its chat
template, so a family with particular tags comes before the families that share some of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from . import call_formats as calls
from . import layouts
from .bodies import BodyStatus
from .bodies.compose import Listing, choice, several
from .bodies.message_header import suffix
from .family import Calls, Family, JsonCall, Opening, Place, ReasoningFormat, Signature, Spelling, ToolFormat
from .layouts import ALWAYS, JSON, THINK, between, invoke_tags, json_list, one_a_line, tags, xml_section


def _has(*texts: str, unless: tuple[str, ...] = ()) -> Signature:
    return Signature(texts, unless)


FAMILIES = (
    Family(
        "gpt-oss",
        layouts.HARMONY,
        calls.HARMONY,
        reasoning_names=("openai_gptoss", "gpt_oss", "harmony", "gpt-oss"),
        call_names=("openai", "openai_gptoss", "gpt_oss", "harmony"),
        reasoning_signs=(_has("<|channel|>", "analysis"),),
        call_signs=(_has("<|channel|>", "to=functions"), _has("<|channel|>", "<|call|>")),
        reasoning_tokens=("<|channel|>", "<|message|>", "<|constrain|>"),
        call_tokens=("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
    ),
    Family(
        "gemma4",
        layouts.channels("<|channel>", "<|channel>thought", "<channel|>"),
        layouts.braces(('<|"|>', '"'), "<|tool_call>", "<tool_call|>"),
        reasoning_signs=(_has("<|channel>", "<channel|>"),),
        call_signs=(_has("<|tool_call>", "<tool_call|>"),),
        reasoning_tokens=("<|channel>", "<channel|>"),
    ),
    Family("functiongemma", calls=layouts.braces(("<escape>",), "<start_function_call>", "<end_function_call>")),
    Family(
        "muse",
        layouts.MUSE,
        xml_section(invoke_tags("atem:"), "<atem:function_calls>", "</atem:function_calls>"),
        aliases=("muse_glimmer", "musespark1x"),
        reasoning_signs=(_has("to=self", "<|message|>"),),
    ),
    Family(
        "inkling",
        tags(
            "<|content_thinking|>",
            "<|end_message|>",
            "<|content_text|>",
            "<|message_model|>",
            "<|content_model_end_sampling|>",
        ),
        layouts.one_a_reply(JsonCall(arguments="args"), "<|content_invoke_tool_json|>", "<|end_message|>"),
    ),
    Family(
        "plamo3",
        replace(tags("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"), atoms=("<|plamo:end_",)),
        calls.PLAMO3,
        call_signs=("<|plamo:begin_tool_request",),
    ),
    Family(
        "k2_horizon",
        ReasoningFormat(
            ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
            ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        ),
        calls.K2_HORIZON,
        reasoning_signs=("<ifm|think",),
        call_signs=("<ifm|tool_call",),
    ),
    Family(
        "kimi_k3",
        ReasoningFormat(
            ("<|open|>think<|sep|>",),
            ("<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>response<|sep|>"),
            atoms=("<|close|>",),
        ),
        calls.KIMI_K3,
        reasoning_signs=("<|open|>think<|sep|>", _has("<|open|>", "<|sep|>", "think")),
        call_signs=("<|open|>tools<|sep|>", _has("<|open|>", "<|sep|>", "tools")),
        call_tokens=("<|open|>", "<|sep|>", "<|close|>"),
    ),
    Family("kimi_k2", THINK, calls.KIMI_K2, aliases=("kimi",), call_signs=("<|tool_calls_section_begin|>",)),
    Family(
        "cohere_command3",
        tags(
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|START_TEXT|>",
            "<|END_TEXT|>",
        ),
        json_list("<|START_ACTION|>", "<|END_ACTION|>", JsonCall(name="tool_name", arguments="parameters")),
        aliases=("cohere_command4",),
    ),
    Family(
        "minimax_m3",
        tags("<mm:think>", "</mm:think>"),
        calls.MINIMAX_M3,
        reasoning_names=("minimax_m3", "minimax-m3"),
        call_signs=("]<]minimax[>[",),
    ),
    Family(
        "minimax_m2",
        ALWAYS,
        calls.MINIMAX_M2,
        aliases=("minimax",),
        reasoning_signs=(_has("<minimax:tool_call>", "<think>"),),
    ),
    Family(
        "minimax_m2_append_think",
        replace(ALWAYS, is_shown=True),
        reasoning_names=("minimax_m2_append_think", "minimax-append-think"),
    ),
    Family("dots", THINK, xml_section(invoke_tags(), "<dots_function_call>", "</dots_function_call>")),
    Family(
        "deepseek_v41",
        THINK,
        layouts.dsml(" calls", " "),
        reasoning_names=("deepseek_v41", "deepseek-v41"),
        call_signs=("｜DSML｜ calls",),
    ),
    Family(
        "deepseek_v4",
        THINK,
        calls.DEEPSEEK_V4,
        reasoning_names=("deepseek_v4", "deepseek-v4"),
        call_signs=(_has("｜DSML｜", "tool_calls", unless=("function_calls",)),),
    ),
    Family("deepseek_v32", calls=calls.DEEPSEEK_V32, call_signs=("｜DSML｜",)),
    Family(
        "deepseek_v3",
        THINK,
        calls.DEEPSEEK_V3,
        reasoning_names=("deepseek_v3", "deepseek-v3"),
        call_signs=(_has("<｜tool▁calls▁begin｜>", "```json"),),
    ),
    Family("deepseek_v31", calls=calls.DEEPSEEK_V31, call_signs=("<｜tool▁calls▁begin｜>",)),
    Family(
        "step3",
        ALWAYS,
        calls.STEP3,
        reasoning_signs=(_has("<think>", "<｜tool_calls_begin｜>"),),
        call_signs=("<steptml:invoke",),
    ),
    Family(
        "seed_oss",
        tags("<seed:think>", "</seed:think>"),
        one_a_line(
            layouts.xml_format(layouts.FUNCTION_TAGS, "<seed:tool_call>", "</seed:tool_call>"), layouts.FUNCTION_CALL
        ),
        call_signs=("<seed:tool_call>",),
    ),
    Family(
        "longcat",
        tags("<longcat_think>", "</longcat_think>"),
        calls.LONGCAT,
        call_signs=("<longcat_tool_call>",),
        reasoning_tokens=("<longcat_think>", "</longcat_think>"),
    ),
    Family(
        "apertus",
        tags("<|inner_prefix|>", "<|inner_suffix|>"),
        json_list("<|tools_prefix|>", "<|tools_suffix|>", JsonCall(name=""), several(layouts.KEYED_JSON, layouts.LIST)),
        reasoning_names=("apertus", "apertus2509"),
    ),
    Family("internlm", THINK, calls.INTERNLM, reasoning_names=("interns1",), call_signs=("<|action_start|>",)),
    Family(
        "gigachat3",
        THINK,
        calls.GIGACHAT3,
        reasoning_names=("gigachat35",),
        call_signs=("<|function_call|>", _has("function call", "<|role_sep|>")),
    ),
    Family("minicpm5", THINK, calls.MINICPM5, call_signs=(_has('<function name="', "<param name="),)),
    Family(
        "phi4_mini_json",
        calls=Calls(
            between(several(JSON, Listing(separators=",", closer="]")), "functools["),
            calls.in_brackets("functools"),
            sign="functools[",
        ),
    ),
    Family("hy_v3", THINK, calls.HY, call_signs=("<tool_sep", _has("<tool_calls", ":opensource"))),
    Family(
        "hy_v4",
        replace(
            THINK,
            headers=(Opening("<think:", suffix(BodyStatus.REASONING)), Opening("</think:", suffix(BodyStatus.TEXT))),
        ),
        calls.HY,
        reasoning_signs=("<think:", _has("<think", ":opensource")),
    ),
    Family("nemotron_nano_v2", calls=json_list("<TOOLCALL>", "</TOOLCALL>"), aliases=("nemotron_json",)),
    Family("apriel", tags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")),
    Family("glm45", THINK, calls.GLM, aliases=("glm47", "ling3", "poolside_v1", "glm4"), call_signs=("<arg_key>",)),
    Family("glm", THINK),
    Family("laguna", calls=calls.GLM),
    Family("llama4_pythonic", calls=calls.LLAMA_PYTHONIC),
    Family(
        "lfm2",
        calls=layouts.enclosed(
            between(choice({"{": JSON}, layouts.PYTHON_CALLS), "<|tool_call_start|>", "<|tool_call_end|>"),
            layouts.PYTHON_EXPRESSION,
            ", ",
            "[]",
        ),
        call_signs=("<|tool_call_start|>", "<|tool_list_start|>"),
        call_tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Family(
        "olmo3",
        THINK,
        layouts.enclosed(
            between(layouts.PYTHON_CALLS, "<function_calls>", "</function_calls>"), layouts.PYTHON_EXPRESSION, "\n"
        ),
    ),
    Family(
        "mistral",
        ReasoningFormat(("[THINK]", "<think>"), ("[/THINK]", "</think>")),
        calls.MISTRAL,
        reasoning_signs=("[THINK]",),
        reasoning_tokens=("[THINK]", "[/THINK]"),
        call_tokens=("[TOOL_CALLS]", "[ARGS]"),
    ),
    Family(
        "granite",
        ReasoningFormat(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
        calls.GRANITE,
        reasoning_signs=("Here is my thought process:",),
    ),
    Family(
        "granite-20b-fc",
        calls=Calls(
            between(layouts.JSON_LIST, "<function_call>", "</function_call>"),
            (Spelling(JsonCall(), "<function_call> ", between="\n"),),
        ),
        call_signs=("<function_call>",),
    ),
    Family(
        "hunyuan_a13b",
        replace(THINK, wrap=("<answer>", "</answer>")),
        calls.HUNYUAN,
        reasoning_names=("hunyuan_a13b", "hunyuan"),
        call_names=("hunyuan_a13b", "jamba"),
        reasoning_signs=(_has("<think>", "<answer>"),),
    ),
    Family(
        "ernie45",
        replace(THINK, wrap=("<response>", "</response>")),
        calls.JSON_LINES,
        reasoning_signs=(_has("</think>", "<response>"),),
    ),
    Family(
        "deepseek_r1",
        ALWAYS,
        reasoning_names=("deepseek_r1", "qwq", "deepseek-r1"),
        reasoning_signs=(_has("<｜Assistant｜>", "</think>", unless=("thinking",)),),
    ),
    Family("step5", ALWAYS, calls.XML_LINES),
    Family(
        "qwen3_xml",
        calls=calls.XML_LINES,
        aliases=("qwen3_coder",),
        call_signs=(_has("<tool_call>", "<function=", "<parameter="),),
    ),
    Family(
        "nemotron_v3",
        replace(THINK, fills_content=True),
        calls.XML_LINES,
        reasoning_names=("nemotron_v3", "nemotron_3"),
        reasoning_signs=(_has("truncate_history_thinking", "<think>"),),
    ),
    Family("step3p5", THINK, calls.XML_LINES),
    Family("granite_thinking_parser", THINK, calls.XML_LINES),
    Family("granite4", calls=calls.JSON_LINES),
    Family("mimo", THINK, calls.MIMO),
    Family(
        "qwen3",
        THINK,
        calls.JSON_LINES,
        reasoning_names=("qwen3", "qwen3-thinking", "holo2", "minicpmv", "nanbeige", "iquest_q1"),
        call_names=("hermes", "qwen3_json"),
        reasoning_signs=("</think>", "<think>"),
        call_signs=("<tool_call>",),
        reasoning_tokens=("<think>", "</think>"),
    ),
    Family(
        "llama3_json",
        calls=calls.LLAMA_JSON,
        aliases=("llama4_json", "llama", "llama3", "llama4"),
        call_signs=("<|python_tag|>", _has('"parameters": ', "<|start_header_id|>")),
    ),
    Family("pythonic", calls=calls.PYTHONIC, call_signs=("func_name1(params_name1",)),
    Family("xlam", calls=calls.XLAM),
    Family("generic", calls=Calls(calls.GENERIC, calls.GENERIC_WRITES)),
)


# The formats by the names that `reasoning_parser` and `tool_call_parser` take
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    name: row.reasoning for row in FAMILIES if row.reasoning is not None for name in row.reasoning_choices
}
CALL_FORMATS: Mapping[str, Calls] = {
    name: row.calls for row in FAMILIES if row.calls is not None for name in row.call_choices
}


@lru_cache(maxsize=256)
def with_tags_only(format: ToolFormat) -> ToolFormat:
    """Return the format without calls in plain text, for a reply in which every call is text."""
    return replace(format, openings=tuple(one for one in format.openings if one.place is Place.ANYWHERE))
