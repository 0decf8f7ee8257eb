"""How each family writes calls when it is made to, by the names of `tool_formats`, with the tags of its parser."""

from collections.abc import Collection
from dataclasses import dataclass

from ...formats.bodies.expression_body import PYTHON
from ...formats.tool_formats import (
    ARG_KEY_TAGS,
    CDATA_TAGS,
    FRAME_TAGS,
    FUNCTION_GEMMA,
    FUNCTION_TAGS,
    GEMMA,
    TOOL_FORMATS,
    VERBATIM_TAGS,
    invoke_tags,
)
from .calls import CallKind, ExpressionCall, JsonCall, KeyedCall, NamedCall, NestedXmlCall, XmlCall


@dataclass(frozen=True, slots=True)
class Spelling:
    """`begin`, then each call in `open` and `close` with `between` in between, then `end`."""

    kind: CallKind
    open: str = ""
    close: str = ""
    between: str = ""
    begin: str = ""
    end: str = ""
    is_single: bool = False  # a reply makes one call at most
    needs: str = ""  # a token of the tokenizer; without it the format's other spelling counts

    @property
    def marker(self) -> str:
        """What a call is known by from its start, in text that is free otherwise."""
        return (self.begin or self.open).rstrip()


_JSON = JsonCall()
_PARAMETERS = JsonCall(arguments="parameters")
_ALL_BREAKS = frozenset({"head", "value", "parameter"})
_PYTHON = ExpressionCall(PYTHON, "(", ")")
_FUNCTION = XmlCall(FUNCTION_TAGS, _ALL_BREAKS)
_ARG_KEY = XmlCall(ARG_KEY_TAGS, frozenset({"head", "key", "parameter"}))
_LINES = frozenset({"head", "parameter"})
_DSML = "｜DSML｜"


def _in_tags(kind: CallKind, open: str, close: str) -> Spelling:
    return Spelling(kind, open, close, between="\n")


def _lines(kind: CallKind, name: str, prefix: str = "") -> Spelling:
    """Each call on lines of its own inside of one pair of tags."""
    return Spelling(kind, begin=f"<{prefix}{name}>\n", close="\n", end=f"</{prefix}{name}>")


def _dsml(name: str, space: str = "") -> Spelling:
    kind = XmlCall(invoke_tags(_DSML + space), _LINES, kind="string")
    return _lines(kind, name, _DSML)


def _deepseek(kind: CallKind) -> Spelling:
    return Spelling(
        kind,
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    )


_JSON_LINES = _in_tags(_JSON, "<tool_call>\n", "\n</tool_call>")
_XML_LINES = _in_tags(_FUNCTION, "<tool_call>\n", "\n</tool_call>")
_PLAMO = NamedCall(
    "<|plamo:begin_tool_name:plamo|>",
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:msg|>",
)

SPELLINGS: dict[str, tuple[Spelling, ...]] = {
    "hermes": (_JSON_LINES,),
    "qwen3_json": (_JSON_LINES,),
    "granite4": (_JSON_LINES,),
    "ernie45": (_JSON_LINES,),
    "qwen3_xml": (_XML_LINES,),
    "qwen3_coder": (_XML_LINES,),
    "nemotron_v3": (_XML_LINES,),
    "step3p5": (_XML_LINES,),
    "step5": (_XML_LINES,),
    "granite_thinking_parser": (_XML_LINES,),
    "mimo": (_in_tags(XmlCall(VERBATIM_TAGS, frozenset({"head", "parameter"})), "<tool_call>\n", "\n</tool_call>"),),
    "seed_oss": (_in_tags(_FUNCTION, "<seed:tool_call>\n", "\n</seed:tool_call>"),),
    "glm45": (_in_tags(_ARG_KEY, "<tool_call>", "</tool_call>"),),
    "hy_v3": (Spelling(_ARG_KEY, "<tool_call>", "</tool_call>", "\n", begin="<tool_calls>\n", end="\n</tool_calls>"),),
    "deepseek_v3": (_deepseek(NamedCall("function<｜tool▁sep｜>", "\n```json\n", "\n```")),),
    "deepseek_v31": (_deepseek(NamedCall("", "<｜tool▁sep｜>")),),
    "deepseek_v32": (_dsml("function_calls"),),
    "deepseek_v4": (_dsml("tool_calls"),),
    "deepseek_v41": (_dsml(" calls", " "),),
    "minimax_m2": (_lines(XmlCall(invoke_tags(), _LINES), "minimax:tool_call"),),
    "minimax_m3": (
        Spelling(
            NestedXmlCall("]<]minimax[>["),
            begin="]<]minimax[>[<tool_call>",
            end="]<]minimax[>[</tool_call>",
        ),
    ),
    "kimi_k2": (
        Spelling(
            NamedCall("functions.", "<|tool_call_argument_begin|>", is_numbered=True),
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    "openai": (
        Spelling(
            NamedCall("", " <|constrain|>json<|message|>"),
            "<|channel|>commentary to=functions.",
            is_single=True,
        ),
    ),
    "mistral": (
        Spelling(NamedCall("", "[ARGS]"), "[TOOL_CALLS]", needs="[ARGS]"),
        Spelling(_JSON, between=", ", begin="[TOOL_CALLS][", end="]"),
    ),
    "llama3_json": (Spelling(_PARAMETERS, between="; "),),
    "pythonic": (Spelling(_PYTHON, between=", ", begin="[", end="]"),),
    "llama4_pythonic": (Spelling(_PYTHON, between=", ", begin="<|python_start|>[", end="]<|python_end|>"),),
    "lfm2": (Spelling(_PYTHON, between=", ", begin="<|tool_call_start|>[", end="]<|tool_call_end|>"),),
    "olmo3": (Spelling(_PYTHON, between="\n", begin="<function_calls>", end="</function_calls>"),),
    "gemma4": (Spelling(ExpressionCall(GEMMA, "{", "}", ","), "<|tool_call>call:", "<tool_call|>"),),
    "functiongemma": (
        Spelling(ExpressionCall(FUNCTION_GEMMA, "{", "}", ","), "<start_function_call>call:", "<end_function_call>"),
    ),
    "granite": (Spelling(_JSON, between=", ", begin="<|tool_call|>[", end="]"),),
    "granite-20b-fc": (Spelling(_JSON, "<function_call> ", "", "\n"),),
    "hunyuan_a13b": (Spelling(_JSON, between=", ", begin="<tool_calls>[", end="]</tool_calls>"),),
    "step3": (
        Spelling(
            XmlCall(invoke_tags("steptml:")),
            "<｜tool_call_begin｜>function<｜tool_sep｜>",
            "<｜tool_call_end｜>",
            begin="<｜tool_calls_begin｜>",
            end="<｜tool_calls_end｜>",
        ),
    ),
    "internlm": (Spelling(_PARAMETERS, "<|action_start|><|plugin|>", "<|action_end|>", is_single=True),),
    "phi4_mini_json": (Spelling(_JSON, between=", ", begin="functools[", end="]"),),
    "longcat": (_in_tags(_JSON, "<longcat_tool_call>\n", "\n</longcat_tool_call>"),),
    "apertus": (Spelling(KeyedCall(), between=", ", begin="<|tools_prefix|>[", end="]<|tools_suffix|>"),),
    "xlam": (Spelling(_JSON, between=", ", begin="[", end="]"),),
    "gigachat3": (Spelling(_JSON, "<|function_call|>", is_single=True),),
    "minicpm5": (Spelling(XmlCall(CDATA_TAGS)),),
    "dots": (_lines(XmlCall(invoke_tags(), _LINES), "dots_function_call"),),
    "k2_horizon": (
        Spelling(
            _JSON, "<ifm|tool_call>", "</ifm|tool_call>", "\n", begin="<ifm|tool_calls>\n", end="\n</ifm|tool_calls>"
        ),
    ),
    "kimi_k3": (
        Spelling(
            XmlCall(FRAME_TAGS, name_key="tool", kind="type"),
            begin="<|open|>tools<|sep|>",
            end="<|close|>tools<|sep|>",
        ),
    ),
    "inkling": (
        Spelling(JsonCall(arguments="args"), "<|content_invoke_tool_json|>", "<|end_message|>", is_single=True),
    ),
    "plamo3": (
        Spelling(
            _PLAMO,
            "<|plamo:begin_tool_request:plamo|>",
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
            begin="<|plamo:begin_tool_requests:plamo|>",
            end="<|plamo:end_tool_requests:plamo|>",
        ),
    ),
    "muse": (_lines(XmlCall(invoke_tags("atem:"), _LINES), "atem:function_calls"),),
    "cohere_command3": (
        Spelling(
            JsonCall(name="tool_name", arguments="parameters"),
            between=", ",
            begin="<|START_ACTION|>[",
            end="]<|END_ACTION|>",
        ),
    ),
    "generic": (_JSON_LINES,),
}
for _name, _format in TOOL_FORMATS.items():  # aliases write as the name that they stand for
    if _name not in SPELLINGS:
        SPELLINGS[_name] = next(
            SPELLINGS[base] for base, each in TOOL_FORMATS.items() if each is _format and base in SPELLINGS
        )


def spelling(tools: str, tokens: Collection[str]) -> Spelling:
    """Of the format of this name, for a tokenizer with these added tokens."""
    return next(each for each in SPELLINGS[tools] if not each.needs or each.needs in tokens)
