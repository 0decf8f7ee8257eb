"""Formats of tool calls that are too long for the families' table: how calls are read, and how they are written."""

from dataclasses import replace
from functools import partial

from .bodies import Body, BodyContext, NewBody
from .bodies.compose import Listing, Name, Step, StepsBody, Tag, after, choice, several
from .bodies.json_body import JsonBody, ObjectBody
from .bodies.nested_xml import NestedXmlBody
from .bodies.xml_body import XmlBody
from .bodies.xml_tags import XmlTags
from .family import CallKind, Calls, JsonCall, NamedCall, NestedXmlCall, Opening, Place, Spelling, ToolFormat, XmlCall
from .layouts import (
    FUNCTION_CALL,
    FUNCTION_TAGS,
    IN_A_ROW,
    JSON,
    JSON_LIST,
    JSON_ROW,
    LIST,
    PURE_LIST,
    PYTHON_CALL,
    PYTHON_CALLS,
    PYTHON_EXPRESSION,
    between,
    dsml,
    enclosed,
    invoke_tags,
    json_list,
    one_a_line,
    xml,
    xml_format,
    xml_section,
)
from .layouts import HARMONY as HARMONY_REASONING

Tags = tuple[str, str]  # an opening and a closing tag

SEPARATED = Listing(separators=";,")
BARE_JSON: NewBody = partial(JsonBody, is_bare=True)
VERBATIM_TAGS = replace(FUNCTION_TAGS, trims_breaks=False)


def arg_key_tags(prefix: str = "", suffix: str = "") -> XmlTags:
    key, value = f"{prefix}arg_key{suffix}>", f"{prefix}arg_value{suffix}>"
    return XmlTags(f"<{key}", f"</{value}", head_end=f"</{key}", value=f"<{value}")


ARG_KEY_TAGS = arg_key_tags()
FUNCTION = xml(FUNCTION_TAGS)


def bare(body: NewBody, marker: str, place: Place = Place.OUTSIDE_REASONING) -> Opening:
    """Open calls without a tag before them: `marker` is their own first text, which the body reads again."""
    return Opening(marker, body, place, keeps_marker=True, is_common=len(marker) == 1)


def section(
    section: Tags, call: Tags, body: NewBody, kind: CallKind, inner: tuple[str, ...], *, head: str = "", line: str = ""
) -> Calls:
    """Return the format of calls with their own tags inside a section's tags, which a model may leave out.

    `head`: follows the opening tag of a call; `line`: separates the calls.
    """
    first = after(head, then=body) if head else body
    openings = (Opening(section[0], after(call[0], then=first)), Opening(call[0], first))
    spelling = Spelling(kind, call[0] + head, call[1], line, begin=section[0] + line, end=line + section[1])
    return Calls(ToolFormat(openings, (call[1], section[1]), inner_tags=inner), (spelling,))


def in_brackets(*markers: str) -> tuple[Spelling, ...]:
    """Write a JSON list of calls after one of the markers."""
    return tuple(Spelling(JsonCall(), between=", ", begin=f"{marker}[", end="]") for marker in markers)


def keyed(tags: XmlTags, *steps: Step) -> NewBody:
    """Read a name, the steps, then a key and a value for each argument."""

    def finish(context: BodyContext, names: list[str]) -> Body:
        return XmlBody(context, tags, names[0])

    return partial(StepsBody, steps=(Name(), *steps), finish=finish)


def named(*steps: Step, trailer: str = "") -> NewBody:
    def finish(context: BodyContext, names: list[str]) -> Body:
        return ObjectBody(context, context.tool_name(names[0]), trailer=trailer)

    return partial(StepsBody, steps=steps, finish=finish)


def _kimi_body(context: BodyContext, names: list[str]) -> Body:
    """Make the body of a call whose name has a number at its end; name and number together are the call's id."""
    written = names[0]
    name, _, number = written.rpartition(":")
    return ObjectBody(context, context.tool_name(name if name and number.isdecimal() else written), call_id=written)


def _mistral_body(context: BodyContext, names: list[str]) -> Body:
    """Make the body of a call whose id follows its name, if the model wrote an id."""
    return ObjectBody(context, names[0], call_id=names[1] if len(names) > 1 else None)


BARE_PYTHON = bare(several(PYTHON_CALL, PURE_LIST), "[")
ARG_KEY = keyed(ARG_KEY_TAGS)
ARG_KEY_CALL = XmlCall(ARG_KEY_TAGS, frozenset({"head", "key", "parameter"}))

# Calls in <tool_call>, and in the tag that lists the tools in many prompts

_IN_TOOLS = choice({"{": several(BARE_JSON, IN_A_ROW), "[": several(BARE_JSON, LIST)})


def _in_tool_call(function: NewBody, json: NewBody) -> ToolFormat:
    """Read JSON, a list, or calls with a tag for each argument in <tool_call>; the last also without <tool_call>."""
    openings = (
        Opening("<tool_call>", choice({"{": json, "[": JSON_LIST, "<": function}, ARG_KEY)),
        Opening("<function=", function, keeps_marker=True, needs_tools=True),
        Opening("<tools>", _IN_TOOLS, Place.OUTSIDE_REASONING, needs_tools=True, is_common=True),
    )
    return ToolFormat(openings, ("</tool_call>", "</tools>"), inner_tags=FUNCTION_TAGS.texts)


_HERMES = _in_tool_call(FUNCTION, JSON_ROW)
JSON_LINES = one_a_line(_HERMES, JsonCall(), FUNCTION_CALL)
XML_LINES = one_a_line(_HERMES, FUNCTION_CALL, JsonCall())
MIMO = one_a_line(_in_tool_call(xml(VERBATIM_TAGS), JSON_ROW), XmlCall(VERBATIM_TAGS, frozenset({"head", "parameter"})))
_GLM_BODY = choice({"{": JSON_ROW, "<": FUNCTION}, ARG_KEY)
GLM = one_a_line(between(_GLM_BODY, "<tool_call>", "</tool_call>", inner=ARG_KEY_TAGS.texts), ARG_KEY_CALL, line="")


def _hy(suffix: str) -> Calls:
    """Hunyuan's calls, whose tags may all carry a suffix."""
    tags = arg_key_tags(suffix=suffix)
    separator = f"<tool_sep{suffix}>"
    return section(
        (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"),
        (f"<tool_call{suffix}>", f"</tool_call{suffix}>"),
        choice({"{": JSON_ROW}, keyed(tags, Tag((separator,), optional=True))),
        XmlCall(tags, ARG_KEY_CALL.breaks),
        (separator, *tags.texts),
        line="\n",
    )


def _together(first: Calls, second: Calls) -> Calls:
    """Read both; write as the first where the tokenizer has its tags."""
    reads, more = first.reads, second.reads
    openings, closes = (*reads.openings, *more.openings), (*reads.closes, *more.closes)
    inner = (*reads.inner_tags, *more.inner_tags)
    needed = tuple(replace(one, needs=one.open) for one in first.writes)
    return Calls(ToolFormat(openings, closes, inner_tags=inner), (*needed, *second.writes))


HY = _together(_hy(":opensource"), _hy(""))
_LONGCAT_TAGS = arg_key_tags("longcat_")
LONGCAT = one_a_line(
    between(
        choice({"{": JSON_ROW}, keyed(_LONGCAT_TAGS)),
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        inner=_LONGCAT_TAGS.texts,
    ),
    XmlCall(_LONGCAT_TAGS, ARG_KEY_CALL.breaks),
    JsonCall(),
    line="",
)

# Calls in sections

_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_deepseek = partial(
    section,
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    inner=(_DEEPSEEK_SEP,),
)
DEEPSEEK_V3 = _deepseek(
    named(Tag(("function",)), Tag((_DEEPSEEK_SEP,)), Name(), Tag(("```json",), optional=True), trailer="```"),
    NamedCall(f"function{_DEEPSEEK_SEP}", "\n```json\n", "\n```"),
)
DEEPSEEK_V31 = _deepseek(named(Name(), Tag((_DEEPSEEK_SEP,))), NamedCall("", _DEEPSEEK_SEP))
KIMI_K2 = section(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    partial(StepsBody, steps=(Name(), Tag(("<|tool_call_argument_begin|>",))), finish=_kimi_body),
    NamedCall("functions.", "<|tool_call_argument_begin|>", is_numbered=True),
    ("<|tool_call_argument_begin|>",),
)
_STEP_TAGS = invoke_tags("steptml:")
STEP3 = section(
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    ("<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
    xml(_STEP_TAGS),
    XmlCall(_STEP_TAGS),
    ("<｜tool_sep｜>", *_STEP_TAGS.texts),
    head="function<｜tool_sep｜>",
)
_PLAMO_STEPS = (
    Tag(("<|plamo:begin_tool_name:plamo|>",)),
    Name(),
    Tag(("<|plamo:end_tool_name:plamo|>",)),
    Tag(("<|plamo:begin_tool_arguments:plamo|>",)),
    Tag(("<|plamo:constrain|>",), optional=True),
    Tag(("json",), optional=True),
    Tag(("<|plamo:msg|>",), optional=True),
)
_PLAMO_END = "<|plamo:end_tool_arguments:plamo|>"
_PLAMO = section(
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
    "<ifm|arg_key>",
    "</ifm|arg_value>",
    head_end="</ifm|arg_key>",
    value="<ifm|arg_value>",
    type="<ifm|arg_type>",
    end_type="</ifm|arg_type>",
)
_K2_HORIZON = section(
    ("<ifm|tool_calls>", "</ifm|tool_calls>"),
    ("<ifm|tool_call>", "</ifm|tool_call>"),
    choice({"{": JSON_ROW, "[": JSON_LIST}, keyed(_IFM_TAGS)),
    JsonCall(),
    _IFM_TAGS.texts,
    line="\n",
)
K2_HORIZON = replace(
    _K2_HORIZON, writes=(*_K2_HORIZON.writes, *(replace(one, kind=XmlCall(_IFM_TAGS)) for one in _K2_HORIZON.writes))
)
_FRAME_TAGS = XmlTags(
    "<|open|>argument",
    "<|close|>argument<|sep|>",
    "<|open|>call",
    "<|close|>call<|sep|>",
    head_end="<|sep|>",
    object="<|open|>json",
    end_object="<|close|>json<|sep|>",
    has_attributes=True,
)
_FRAMES = xml_format(_FRAME_TAGS, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
KIMI_K3 = enclosed(
    replace(
        _FRAMES,
        drops=("<|close|>message<|sep|>", "<|end_of_msg|>"),
        inner_tags=(*_FRAMES.inner_tags, "<|open|>", "<|close|>"),
    ),
    XmlCall(_FRAME_TAGS, name_key="tool", kind="type"),
)
_CDATA_TAGS = XmlTags("<param", "</param>", "<function", "</function>", has_attributes=True, has_cdata=True)
MINICPM5 = Calls(
    ToolFormat((bare(xml(_CDATA_TAGS), "<function name=", Place.ANYWHERE),), inner_tags=_CDATA_TAGS.texts),
    (Spelling(XmlCall(_CDATA_TAGS)),),
)
_MINIMAX = "]<]minimax[>["
_ELEMENTS = several(partial(NestedXmlBody, prefix=_MINIMAX), IN_A_ROW)
_MINIMAX_OPENINGS = (
    Opening(f"{_MINIMAX}<tool_call>", _ELEMENTS),
    Opening(f"{_MINIMAX}<invoke", _ELEMENTS, keeps_marker=True),
)
MINIMAX_M3 = enclosed(
    ToolFormat(_MINIMAX_OPENINGS, (f"{_MINIMAX}</tool_call>",), inner_tags=(_MINIMAX,)), NestedXmlCall(_MINIMAX)
)
MINIMAX_M2 = xml_section(invoke_tags(), "<minimax:tool_call>", "</minimax:tool_call>")
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
_MISTRAL_BODY = choice({"[": JSON_LIST, "{": JSON_ROW}, partial(StepsBody, steps=_MISTRAL_STEPS, finish=_mistral_body))
MISTRAL = Calls(
    ToolFormat((Opening("[TOOL_CALLS]", _MISTRAL_BODY),), inner_tags=("[ARGS]", "[CALL_ID]"), id_length=9),
    (Spelling(NamedCall("", "[ARGS]"), "[TOOL_CALLS]", needs="[ARGS]"), *in_brackets("[TOOL_CALLS]")),
    sign="[TOOL_CALLS]",
)
LLAMA_JSON = Calls(
    ToolFormat(
        (
            Opening("<|python_tag|>", several(JSON, SEPARATED)),
            bare(several(BARE_JSON, SEPARATED), "{"),
            bare(several(BARE_JSON, PURE_LIST), "[", Place.AT_START),
        ),
        drops=("<|eom_id|>",),
    ),
    tuple(Spelling(JsonCall(arguments="parameters"), between="; ", begin=begin) for begin in ("", "<|python_tag|>")),
)
_XLAM_LIST = several(BARE_JSON, LIST)
XLAM = Calls(
    ToolFormat(
        (
            Opening("[TOOL_CALLS]", JSON_LIST),
            Opening("<tool_call>", JSON_LIST),
            Opening("```json", _XLAM_LIST, Place.OUTSIDE_REASONING, is_common=True),
            Opening("```", _XLAM_LIST, Place.OUTSIDE_REASONING, is_common=True),
            bare(several(BARE_JSON, PURE_LIST), "["),
            bare(several(BARE_JSON, SEPARATED), "{"),
        ),
        ("</tool_call>", "```"),
    ),
    in_brackets("", "[TOOL_CALLS]", "<tool_call>"),
)
GRANITE = Calls(
    ToolFormat((Opening("<|tool_call|>", JSON_LIST), Opening("<tool_call>", JSON_LIST)), ("</tool_call>",)),
    in_brackets("<|tool_call|>", "<tool_call>"),
    sign="<|tool_call|>",
)
INTERNLM = Calls(
    between(after("<|plugin|>", then=JSON_ROW), "<|action_start|>", "<|action_end|>", inner=("<|plugin|>",)),
    (Spelling(JsonCall(arguments="parameters"), "<|action_start|><|plugin|>", "<|action_end|>", is_single=True),),
)
_FUNCTION_ROLE = after("function call", then=after("<|role_sep|>", then=JSON_ROW))
GIGACHAT3 = Calls(
    ToolFormat(
        (Opening("<|message_sep|>", _FUNCTION_ROLE), Opening("<|function_call|>", JSON_ROW)),
        inner_tags=("<|role_sep|>",),
    ),
    (
        Spelling(JsonCall(), "<|function_call|>", is_single=True),
        Spelling(JsonCall(), "<|message_sep|>function call<|role_sep|>", is_single=True),
    ),
)
HUNYUAN = json_list("<tool_calls>", "</tool_calls>")
PYTHONIC = Calls(ToolFormat((BARE_PYTHON,)), (Spelling(PYTHON_EXPRESSION, between=", ", begin="[", end="]"),))
LLAMA_PYTHONIC = enclosed(
    ToolFormat((Opening("<|python_start|>", PYTHON_CALLS), BARE_PYTHON), ("<|python_end|>",)),
    PYTHON_EXPRESSION,
    ", ",
    "[]",
)

# Calls in the formats of many families, for a model without its own format. They count for declared tools only.

_LISTS = choice({"{": JSON}, JSON_LIST)
_GENERIC_BODIES: dict[str, NewBody] = {
    "<tool_call>": choice({"{": JSON_ROW, "[": JSON_LIST, "<": FUNCTION}, ARG_KEY),
    "<tool_calls>": _LISTS,
    "<function_call>": _LISTS,
    "<|tool_call|>": _LISTS,
    "<longcat_tool_call>": JSON_ROW,
    "[TOOL_CALLS]": _MISTRAL_BODY,
    "<|python_tag|>": several(JSON, SEPARATED),
    "<|tool_call_start|>": choice({"{": JSON}, PYTHON_CALLS),
}
_GENERIC_OPENINGS = (
    *(Opening(marker, body, Place.OUTSIDE_REASONING) for marker, body in _GENERIC_BODIES.items()),
    bare(FUNCTION, "<function="),
    bare(several(BARE_JSON, SEPARATED), "{", Place.AT_START),
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
_GENERIC_WRITES = (JSON_LINES, GLM, HUNYUAN, GRANITE, MISTRAL, LLAMA_JSON, MINIMAX_M2, DEEPSEEK_V32, DEEPSEEK_V4)
GENERIC_WRITES = tuple(spelling for calls in _GENERIC_WRITES for spelling in calls.writes)
