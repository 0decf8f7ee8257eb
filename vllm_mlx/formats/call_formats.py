"""Tool calls that take more than one line of the families' table: how they are read and how they are written."""

from dataclasses import replace
from functools import partial

from .bodies import NewBody
from .bodies.compose import Listing, Name, StepsBody, Tag, after, choice, several
from .bodies.nested_xml import NestedXmlBody
from .bodies.xml_body import XmlTags
from .call_layouts import (
    ARG_KEY,
    ARG_KEY_CALL,
    ARG_KEY_TAGS,
    BARE_JSON,
    BARE_PYTHON,
    FUNCTION,
    FUNCTION_CALL,
    FUNCTION_TAGS,
    IN_A_ROW,
    JSON,
    JSON_LIST,
    LIST,
    PURE_LIST,
    PYTHON_CALLS,
    VERBATIM_TAGS,
    bare,
    between,
    invoke_tags,
    json_list,
    keyed,
    kimi_body,
    mistral_body,
    named,
    nested,
    one_a_line,
    python_list,
    xml,
    xml_format,
    xml_section,
)
from .family import Calls, Opening, Place, ToolFormat
from .reasoning_formats import HARMONY as HARMONY_REASONING
from .spelling import CallKind, JsonCall, NamedCall, NestedXmlCall, Spelling, XmlCall

# Calls in <tool_call>

HERMES = ToolFormat(
    (
        Opening("<tool_call>", choice({"{": several(JSON, IN_A_ROW), "[": JSON_LIST, "<": FUNCTION})),
        Opening("<function=", FUNCTION, keeps_marker=True, needs_tools=True),
    ),
    ("</tool_call>",),
    inner_tags=FUNCTION_TAGS.texts,
)
JSON_LINES = one_a_line(HERMES, JsonCall(), "<tool_call>\n", "\n</tool_call>")
XML_LINES = one_a_line(HERMES, FUNCTION_CALL, "<tool_call>\n", "\n</tool_call>")
MIMO = one_a_line(
    replace(
        HERMES,
        openings=(
            Opening("<tool_call>", choice({"{": JSON, "[": JSON_LIST, "<": xml(VERBATIM_TAGS)})),
            Opening("<function=", xml(VERBATIM_TAGS), keeps_marker=True, needs_tools=True),
        ),
    ),
    XmlCall(VERBATIM_TAGS, frozenset({"head", "parameter"})),
    "<tool_call>\n",
    "\n</tool_call>",
)
GLM = one_a_line(
    between(choice({"{": JSON, "<": FUNCTION}, ARG_KEY), "<tool_call>", "</tool_call>", inner=ARG_KEY_TAGS.texts),
    ARG_KEY_CALL,
    "<tool_call>",
    "</tool_call>",
)
_HY_BODY = choice({"{": JSON}, keyed(ARG_KEY_TAGS, Tag(("<tool_sep>",), optional=True)))
HY = Calls(
    replace(
        nested("<tool_calls>", "</tool_calls>", "<tool_call>", _HY_BODY, "</tool_call>"),
        inner_tags=("<tool_sep>", *ARG_KEY_TAGS.texts),
    ),
    (Spelling(ARG_KEY_CALL, "<tool_call>", "</tool_call>", "\n", begin="<tool_calls>\n", end="\n</tool_calls>"),),
)

# Calls in sections

_DEEPSEEK_SEP = "<｜tool▁sep｜>"


def _section(
    section: tuple[str, str], call: tuple[str, str], body: NewBody, kind: CallKind, inner: tuple[str, ...]
) -> Calls:
    """Calls with tags of their own inside the tags of a section."""
    reads = replace(nested(*section, call[0], body, call[1]), inner_tags=inner)
    return Calls(reads, (Spelling(kind, *call, begin=section[0], end=section[1]),))


_deepseek = partial(
    _section,
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    inner=(_DEEPSEEK_SEP,),
)
DEEPSEEK_V3 = _deepseek(
    named(Tag(("function",)), Tag((_DEEPSEEK_SEP,)), Name(), Tag(("```json",), optional=True), trailer="```"),
    NamedCall(f"function{_DEEPSEEK_SEP}", "\n```json\n", "\n```"),
)
DEEPSEEK_V31 = _deepseek(named(Name(), Tag((_DEEPSEEK_SEP,))), NamedCall("", _DEEPSEEK_SEP))
KIMI_K2 = _section(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    partial(StepsBody, steps=(Name(), Tag(("<|tool_call_argument_begin|>",))), finish=kimi_body),
    NamedCall("functions.", "<|tool_call_argument_begin|>", is_numbered=True),
    ("<|tool_call_argument_begin|>",),
)
_STEP_TAGS = invoke_tags("steptml:")
_STEP = _section(
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    ("<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
    after("function<｜tool_sep｜>", then=xml(_STEP_TAGS)),
    XmlCall(_STEP_TAGS),
    ("<｜tool_sep｜>", *_STEP_TAGS.texts),
)
STEP3 = replace(_STEP, writes=(replace(_STEP.writes[0], open="<｜tool_call_begin｜>function<｜tool_sep｜>"),))
_PLAMO_STEPS = (
    Tag(("<|plamo:begin_tool_name:plamo|>",)),
    Name(),
    Tag(("<|plamo:end_tool_name:plamo|>",)),
    Tag(("<|plamo:begin_tool_arguments:plamo|>",)),
    Tag(("<|plamo:constrain|>json",), optional=True),
    Tag(("<|plamo:msg|>",), optional=True),
)
_PLAMO_END = "<|plamo:end_tool_arguments:plamo|>"
_PLAMO = _section(
    ("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
    ("<|plamo:begin_tool_request:plamo|>", "<|plamo:end_tool_request:plamo|>"),
    named(*_PLAMO_STEPS),
    NamedCall(
        "<|plamo:begin_tool_name:plamo|>",
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:msg|>",
        trailer=_PLAMO_END,
    ),
    tuple(text for step in _PLAMO_STEPS if isinstance(step, Tag) for text in step.texts),
)
PLAMO3 = replace(_PLAMO, reads=replace(_PLAMO.reads, closes=(_PLAMO_END, *_PLAMO.reads.closes)))
_IFM_TAGS = XmlTags(
    parameter="<ifm|arg_key>",
    end_parameter="</ifm|arg_value>",
    head_end="</ifm|arg_key>",
    value="<ifm|arg_value>",
    type="<ifm|arg_type>",
    end_type="</ifm|arg_type>",
)
_IFM_BODY = choice({"{": JSON, "[": JSON_LIST}, keyed(_IFM_TAGS))
K2_HORIZON = Calls(
    replace(
        nested("<ifm|tool_calls>", "</ifm|tool_calls>", "<ifm|tool_call>", _IFM_BODY, "</ifm|tool_call>"),
        inner_tags=_IFM_TAGS.texts,
    ),
    (
        Spelling(
            JsonCall(),
            open="<ifm|tool_call>",
            close="</ifm|tool_call>",
            between="\n",
            begin="<ifm|tool_calls>\n",
            end="\n</ifm|tool_calls>",
        ),
    ),
)
_FRAME_TAGS = XmlTags(
    parameter="<|open|>argument",
    end_parameter="<|close|>argument<|sep|>",
    function="<|open|>call",
    end_function="<|close|>call<|sep|>",
    head_end="<|sep|>",
    has_attributes=True,
)
KIMI_K3 = Calls(
    xml_format(_FRAME_TAGS, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    (
        Spelling(
            XmlCall(_FRAME_TAGS, name_key="tool", kind="type"),
            begin="<|open|>tools<|sep|>",
            end="<|close|>tools<|sep|>",
        ),
    ),
)
_CDATA_TAGS = XmlTags(
    parameter="<param",
    end_parameter="</param>",
    function="<function",
    end_function="</function>",
    has_attributes=True,
    has_cdata=True,
)
MINICPM5 = Calls(
    ToolFormat((bare(xml(_CDATA_TAGS), "<function name=", Place.ANYWHERE),), inner_tags=_CDATA_TAGS.texts),
    (Spelling(XmlCall(_CDATA_TAGS)),),
)
_MINIMAX = "]<]minimax[>["
_ELEMENTS = several(partial(NestedXmlBody, prefix=_MINIMAX), IN_A_ROW)
MINIMAX_M3 = Calls(
    ToolFormat(
        (Opening(f"{_MINIMAX}<tool_call>", _ELEMENTS), Opening(f"{_MINIMAX}<invoke", _ELEMENTS, keeps_marker=True)),
        (f"{_MINIMAX}</tool_call>",),
    ),
    (Spelling(NestedXmlCall(_MINIMAX), begin=f"{_MINIMAX}<tool_call>", end=f"{_MINIMAX}</tool_call>"),),
)
MINIMAX_M2 = xml_section(invoke_tags(), "<minimax:tool_call>", "</minimax:tool_call>")


def dsml(section: str, space: str = "") -> Calls:
    """DeepSeek's markup, every tag behind one token."""
    tags = invoke_tags(f"｜DSML｜{space}")
    return xml_section(tags, f"<｜DSML｜{section}>", f"</｜DSML｜{section}>", kind="string")


DEEPSEEK_V32 = dsml("function_calls")
DEEPSEEK_V4 = dsml("tool_calls")

# Messages with headers

HARMONY = Calls(
    ToolFormat(
        HARMONY_REASONING.headers,
        ("<|call|>", "<|end|>"),
        inner_tags=HARMONY_REASONING.header_tags,
        reasoning=HARMONY_REASONING,
    ),
    (Spelling(NamedCall("", " <|constrain|>json<|message|>"), "<|channel|>commentary to=functions.", is_single=True),),
)

# Lists and expressions

_MISTRAL_STEPS = (Name(), Name(after="[CALL_ID]"), Tag(("[ARGS]",), optional=True))
_MISTRAL_BODY = choice({"[": JSON_LIST, "{": JSON}, partial(StepsBody, steps=_MISTRAL_STEPS, finish=mistral_body))
MISTRAL = Calls(
    ToolFormat((Opening("[TOOL_CALLS]", _MISTRAL_BODY),), inner_tags=("[ARGS]", "[CALL_ID]"), id_length=9),
    (
        Spelling(NamedCall("", "[ARGS]"), "[TOOL_CALLS]", needs="[ARGS]"),
        Spelling(JsonCall(), between=", ", begin="[TOOL_CALLS][", end="]"),
    ),
)
_SEPARATED = Listing(separators=";,")
LLAMA_JSON = Calls(
    ToolFormat(
        (
            Opening("<|python_tag|>", several(JSON, _SEPARATED)),
            bare(several(BARE_JSON, _SEPARATED), "{"),
            bare(several(BARE_JSON, PURE_LIST), "[", Place.AT_START),
        ),
        drops=("<|eom_id|>",),
    ),
    (Spelling(JsonCall(arguments="parameters"), between="; "),),
)
_XLAM_LIST = several(BARE_JSON, LIST)
XLAM = Calls(
    ToolFormat(
        (
            Opening("[TOOL_CALLS]", JSON_LIST),
            Opening("<tool_call>", JSON_LIST),
            Opening("```json", _XLAM_LIST, Place.OUTSIDE_REASONING),
            Opening("```", _XLAM_LIST, Place.OUTSIDE_REASONING),
            bare(several(BARE_JSON, PURE_LIST), "["),
            bare(several(BARE_JSON, _SEPARATED), "{"),
        ),
        ("</tool_call>", "```"),
    ),
    (Spelling(JsonCall(), between=", ", begin="[", end="]"),),
)
GRANITE = Calls(
    ToolFormat((Opening("<|tool_call|>", JSON_LIST), Opening("<tool_call>", JSON_LIST)), ("</tool_call>",)),
    (Spelling(JsonCall(), between=", ", begin="<|tool_call|>[", end="]"),),
)
GIGACHAT3 = Calls(
    ToolFormat(
        (Opening("<|message_sep|>\n\nfunction call<|role_sep|>\n", JSON), Opening("<|function_call|>", JSON)),
        drops=("<|message_sep|>",),
    ),
    (Spelling(JsonCall(), "<|function_call|>", is_single=True),),
)
HUNYUAN = json_list("<tool_calls>", "</tool_calls>")
PYTHONIC = python_list(ToolFormat((BARE_PYTHON,)))
LLAMA_PYTHONIC = python_list(
    ToolFormat((Opening("<|python_start|>", PYTHON_CALLS), BARE_PYTHON), ("<|python_end|>",)),
    "<|python_start|>",
    "<|python_end|>",
)

# Calls in the formats of many families, for a model without a format of its own. They count for declared tools only.

_LISTS = choice({"{": JSON}, JSON_LIST)
_GENERIC_BODIES: dict[str, NewBody] = {
    "<tool_call>": choice({"{": several(JSON, IN_A_ROW), "[": JSON_LIST, "<": FUNCTION}, ARG_KEY),
    "<tool_calls>": _LISTS,
    "<function_call>": _LISTS,
    "<|tool_call|>": _LISTS,
    "<longcat_tool_call>": JSON,
    "[TOOL_CALLS]": _MISTRAL_BODY,
    "<|python_tag|>": several(JSON, _SEPARATED),
    "<|tool_call_start|>": choice({"{": JSON}, PYTHON_CALLS),
}
_GENERIC_OPENINGS = (
    *(Opening(marker, body, Place.OUTSIDE_REASONING) for marker, body in _GENERIC_BODIES.items()),
    bare(FUNCTION, "<function="),
    bare(several(BARE_JSON, _SEPARATED), "{", Place.AT_START),
    *(
        replace(opening, place=Place.OUTSIDE_REASONING)
        for calls in (MINIMAX_M2, DEEPSEEK_V32, DEEPSEEK_V4)
        for opening in calls.reads.openings
    ),
    replace(BARE_PYTHON, place=Place.AT_START),
)
_GENERIC_PARTS = [calls.reads for calls in (GLM, JSON_LINES, HUNYUAN, MINIMAX_M2, DEEPSEEK_V32, DEEPSEEK_V4)]
_GENERIC_CLOSES = ("</function_call>", "</longcat_tool_call>", "<|tool_call_end|>")
GENERIC = ToolFormat(
    tuple(replace(opening, needs_tools=True) for opening in _GENERIC_OPENINGS),
    (*_GENERIC_CLOSES, *dict.fromkeys(close for part in _GENERIC_PARTS for close in part.closes)),
    inner_tags=tuple(dict.fromkeys(tag for part in _GENERIC_PARTS for tag in part.inner_tags)),
    is_fallback=True,
)
