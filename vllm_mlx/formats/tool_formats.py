"""How model families write tool calls, by the names that users choose them with."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from .bodies import Body, BodyContext, NewBody
from .bodies.compose import Listing, Name, Step, StepsBody, Tag, after, choice, several
from .bodies.expression_body import PYTHON, Dialect, ExpressionBody
from .bodies.json_body import JsonBody
from .bodies.nested_xml import NestedXmlBody
from .bodies.object_body import KeyedBody, ObjectBody
from .bodies.xml_body import XmlBody
from .bodies.xml_tags import XmlTags
from .family import Opening, Place, ToolFormat
from .reasoning_formats import HARMONY_HEADERS, REASONING_FORMATS

_LIST = Listing(separators=",", opener="[", closer="]")
_PURE_LIST = Listing(separators=",", opener="[", closer="]", needs_opener=True)
_IN_A_ROW = Listing()

JSON: NewBody = JsonBody
_BARE_JSON: NewBody = partial(JsonBody, is_bare=True)
JSON_LIST = several(JSON, _LIST)


# Calls whose arguments have tags of their own

FUNCTION_TAGS = XmlTags(
    parameter="<parameter=",
    end_parameter="</parameter>",
    function="<function=",
    end_function="</function>",
    trims_breaks=True,
)
ARG_KEY_TAGS = XmlTags(parameter="<arg_key>", end_parameter="</arg_value>", head_end="</arg_key>", value="<arg_value>")
IFM_TAGS = XmlTags(
    parameter="<ifm|arg_key>",
    end_parameter="</ifm|arg_value>",
    head_end="</ifm|arg_key>",
    value="<ifm|arg_value>",
    type="<ifm|arg_type>",
    end_type="</ifm|arg_type>",
)
FRAME_TAGS = XmlTags(
    parameter="<|open|>argument",
    end_parameter="<|close|>argument<|sep|>",
    function="<|open|>call",
    end_function="<|close|>call<|sep|>",
    head_end="<|sep|>",
    has_attributes=True,
)
CDATA_TAGS = XmlTags(
    parameter="<param",
    end_parameter="</param>",
    function="<function",
    end_function="</function>",
    has_attributes=True,
    has_cdata=True,
)


def invoke_tags(prefix: str = "") -> XmlTags:
    return XmlTags(
        parameter=f"<{prefix}parameter",
        end_parameter=f"</{prefix}parameter>",
        function=f"<{prefix}invoke",
        end_function=f"</{prefix}invoke>",
        has_attributes=True,
    )


def _xml(tags: XmlTags) -> NewBody:
    return several(partial(XmlBody, tags=tags), _IN_A_ROW)


def _xml_format(tags: XmlTags, open: str, *closes: str, steps: tuple[str, ...] = ()) -> ToolFormat:
    """Calls in a row between `open` and `closes`, or on their own where `open` was left out."""
    body = _xml(tags)
    for step in reversed(steps):
        body = after(step, then=body)
    openings = [Opening(open, body), Opening(tags.function, _xml(tags), keeps_marker=True, needs_tools=True)]
    openings += [Opening(step, _xml(tags)) for step in steps[:1]]
    return ToolFormat(tuple(openings), closes, inner_tags=(*tags.texts, *steps))


FUNCTION = _xml(FUNCTION_TAGS)
VERBATIM_TAGS = XmlTags(
    FUNCTION_TAGS.parameter, FUNCTION_TAGS.end_parameter, FUNCTION_TAGS.function, FUNCTION_TAGS.end_function
)


def _keyed(tags: XmlTags, *steps: Step) -> NewBody:
    """The name, then a key and a value for each argument."""

    def finish(context: BodyContext, names: list[str]) -> Body:
        return XmlBody(context, tags, names[0])

    return partial(StepsBody, steps=(Name(), *steps), finish=finish)


ARG_KEY = _keyed(ARG_KEY_TAGS)
_HY_ARG_KEY = _keyed(ARG_KEY_TAGS, Tag(("<tool_sep>",), optional=True))
_IFM_BODY = choice({"{": JSON, "[": JSON_LIST}, _keyed(IFM_TAGS))


# Calls whose name stands before a JSON object


def _named(*steps: Step, trailer: str = "") -> NewBody:
    def finish(context: BodyContext, names: list[str]) -> Body:
        return ObjectBody(context, names[0].removeprefix("functions."), trailer=trailer)

    return partial(StepsBody, steps=steps, finish=finish)


def _kimi_body(context: BodyContext, names: list[str]) -> Body:
    written = names[0]
    name, _, number = written.removeprefix("functions.").rpartition(":")
    return ObjectBody(context, name if name and number.isdecimal() else written, call_id=written)


def _mistral_body(context: BodyContext, names: list[str]) -> Body:
    return ObjectBody(context, names[0], call_id=names[1] if len(names) > 1 else None)


_KIMI = partial(StepsBody, steps=(Name(), Tag(("<|tool_call_argument_begin|>",))), finish=_kimi_body)
_MISTRAL_STEPS = (Name(), Name(after="[CALL_ID]"), Tag(("[ARGS]",), optional=True))
MISTRAL = choice({"[": JSON_LIST, "{": JSON}, partial(StepsBody, steps=_MISTRAL_STEPS, finish=_mistral_body))
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_V3 = _named(
    Tag(("function",)), Tag((_DEEPSEEK_SEP,)), Name(), Tag(("```json",), optional=True), trailer="```"
)
_DEEPSEEK_V31 = _named(Name(), Tag((_DEEPSEEK_SEP,)))
_PLAMO_STEPS = (
    Tag(("<|plamo:begin_tool_name:plamo|>",)),
    Name(),
    Tag(("<|plamo:end_tool_name:plamo|>",)),
    Tag(("<|plamo:begin_tool_arguments:plamo|>",)),
    Tag(("<|plamo:constrain|>json",), optional=True),
    Tag(("<|plamo:msg|>",), optional=True),
)
_PLAMO_ENDS = tuple(f"<|plamo:end_tool_{part}:plamo|>" for part in ("arguments", "request", "requests"))


def _nested(section: str, section_end: str, call: str, body: NewBody, *closes: str) -> ToolFormat:
    """Calls with tags of their own inside a section, whose tags may be left out."""
    openings = (Opening(section, after(call, then=body)), Opening(call, body))
    return ToolFormat(openings, (*closes, section_end))


def _with_tags(format: ToolFormat, *tags: str) -> ToolFormat:
    return replace(format, inner_tags=tags)


# Calls written as expressions

GEMMA = Dialect(('<|"|>', '"'), ":", has_escapes=False, has_words=True)
FUNCTION_GEMMA = Dialect(("<escape>",), ":", has_escapes=False, has_words=True)
PYTHON_CALL = partial(ExpressionBody, dialect=PYTHON, opener="(")
PYTHON_CALLS = several(PYTHON_CALL, Listing(separators=",;", opener="[", closer="]"))
_BARE_PYTHON = Opening(
    "[",
    several(PYTHON_CALL, Listing(separators=",", opener="[", closer="]", needs_opener=True)),
    Place.OUTSIDE_REASONING,
    keeps_marker=True,
)


def _braces(dialect: Dialect) -> NewBody:
    return several(after("call:", then=partial(ExpressionBody, dialect=dialect, opener="{")), Listing(separators=","))


def _tagged(body: NewBody, open: str, *closes: str, inner: tuple[str, ...] = ()) -> ToolFormat:
    return ToolFormat((Opening(open, body),), closes, inner_tags=inner)


def _bare(body: NewBody, marker: str, place: Place = Place.OUTSIDE_REASONING) -> Opening:
    return Opening(marker, body, place, keeps_marker=True)


_TOOL_CALL_BODY = choice({"{": several(JSON, _IN_A_ROW), "[": JSON_LIST, "<": FUNCTION})
_HERMES = ToolFormat(
    (
        Opening("<tool_call>", _TOOL_CALL_BODY),
        Opening("<function=", FUNCTION, keeps_marker=True, needs_tools=True),
    ),
    ("</tool_call>",),
    inner_tags=FUNCTION_TAGS.texts,
)
_MIMO = ToolFormat(
    (
        Opening("<tool_call>", choice({"{": JSON, "[": JSON_LIST, "<": _xml(VERBATIM_TAGS)})),
        Opening("<function=", _xml(VERBATIM_TAGS), keeps_marker=True, needs_tools=True),
    ),
    ("</tool_call>",),
    inner_tags=FUNCTION_TAGS.texts,
)
_GLM = ToolFormat(
    (Opening("<tool_call>", choice({"{": JSON, "<": FUNCTION}, ARG_KEY)),),
    ("</tool_call>",),
    inner_tags=ARG_KEY_TAGS.texts,
)
_HUNYUAN = _tagged(JSON_LIST, "<tool_calls>", "</tool_calls>")
_HY_BODY = choice({"{": JSON}, _HY_ARG_KEY)
_HY = _with_tags(
    _nested("<tool_calls>", "</tool_calls>", "<tool_call>", _HY_BODY, "</tool_call>"), "<tool_sep>", *ARG_KEY_TAGS.texts
)
_DEEPSEEK_TAGS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
_DSML = "｜DSML｜"
_LLAMA_CALLS = Listing(separators=";,")
_LLAMA_JSON = ToolFormat(
    (
        Opening("<|python_tag|>", several(JSON, _LLAMA_CALLS)),
        _bare(several(_BARE_JSON, _LLAMA_CALLS), "{"),
        _bare(several(_BARE_JSON, _PURE_LIST), "[", Place.AT_START),
    ),
    drops=("<|eom_id|>",),
)
_XLAM_LIST = several(_BARE_JSON, _LIST)
_XLAM = ToolFormat(
    (
        Opening("[TOOL_CALLS]", JSON_LIST),
        Opening("<tool_call>", JSON_LIST),
        Opening("```json", _XLAM_LIST, Place.OUTSIDE_REASONING),
        Opening("```", _XLAM_LIST, Place.OUTSIDE_REASONING),
        _bare(several(_BARE_JSON, _PURE_LIST), "["),
        _bare(several(_BARE_JSON, _LLAMA_CALLS), "{"),
    ),
    ("</tool_call>", "```"),
)
_PLAMO_CALL = "<|plamo:begin_tool_request:plamo|>"
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_FRAME_TOOLS = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "mimo": _MIMO,
    "seed_oss": _xml_format(FUNCTION_TAGS, "<seed:tool_call>", "</seed:tool_call>"),
    "glm45": _GLM,
    "hy_v3": _HY,
    "deepseek_v3": _with_tags(_nested(*_DEEPSEEK_TAGS, _DEEPSEEK_V3, "<｜tool▁call▁end｜>"), _DEEPSEEK_SEP),
    "deepseek_v31": _with_tags(_nested(*_DEEPSEEK_TAGS, _DEEPSEEK_V31, "<｜tool▁call▁end｜>"), _DEEPSEEK_SEP),
    "deepseek_v32": _xml_format(invoke_tags(_DSML), f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
    "deepseek_v4": _xml_format(invoke_tags(_DSML), f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"),
    "deepseek_v41": _xml_format(invoke_tags(_DSML + " "), f"<{_DSML} calls>", f"</{_DSML} calls>"),
    "minimax_m2": _xml_format(invoke_tags(), "<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": ToolFormat(
        (
            Opening("]<]minimax[>[<tool_call>", several(partial(NestedXmlBody, prefix="]<]minimax[>["), _IN_A_ROW)),
            Opening(
                "]<]minimax[>[<invoke",
                several(partial(NestedXmlBody, prefix="]<]minimax[>["), _IN_A_ROW),
                keeps_marker=True,
            ),
        ),
        ("]<]minimax[>[</tool_call>",),
    ),
    "kimi_k2": _with_tags(
        _nested(*_KIMI_SECTION, "<|tool_call_begin|>", _KIMI, "<|tool_call_end|>"), "<|tool_call_argument_begin|>"
    ),
    "openai": ToolFormat(
        HARMONY_HEADERS,
        ("<|call|>", "<|end|>"),
        inner_tags=("<|message|>", "<|constrain|>"),
        reasoning=REASONING_FORMATS["openai_gptoss"],
    ),
    "mistral": ToolFormat((Opening("[TOOL_CALLS]", MISTRAL),), inner_tags=("[ARGS]", "[CALL_ID]"), id_length=9),
    "llama3_json": _LLAMA_JSON,
    "pythonic": ToolFormat((_BARE_PYTHON,)),
    "llama4_pythonic": ToolFormat((Opening("<|python_start|>", PYTHON_CALLS), _BARE_PYTHON), ("<|python_end|>",)),
    "lfm2": _tagged(choice({"{": JSON}, PYTHON_CALLS), "<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": _tagged(PYTHON_CALLS, "<function_calls>", "</function_calls>"),
    "gemma4": _tagged(_braces(GEMMA), "<|tool_call>", "<tool_call|>", inner=('<|"|>',)),
    "functiongemma": _tagged(
        _braces(FUNCTION_GEMMA), "<start_function_call>", "<end_function_call>", inner=("<escape>",)
    ),
    "granite": ToolFormat((Opening("<|tool_call|>", JSON_LIST), Opening("<tool_call>", JSON_LIST)), ("</tool_call>",)),
    "granite-20b-fc": _tagged(JSON_LIST, "<function_call>", "</function_call>"),
    "hunyuan_a13b": _HUNYUAN,
    "step3": ToolFormat(
        (
            Opening(
                "<｜tool_calls_begin｜>",
                after(
                    "<｜tool_call_begin｜>", then=after("function<｜tool_sep｜>", then=_xml(invoke_tags("steptml:")))
                ),
            ),
            Opening("<｜tool_call_begin｜>", after("function<｜tool_sep｜>", then=_xml(invoke_tags("steptml:")))),
        ),
        ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        inner_tags=("<｜tool_sep｜>", *invoke_tags("steptml:").texts),
    ),
    "internlm": _tagged(JSON, "<|action_start|><|plugin|>", "<|action_end|>"),
    "phi4_mini_json": _tagged(several(JSON, _PURE_LIST), "functools"),
    "longcat": _tagged(several(JSON, _IN_A_ROW), "<longcat_tool_call>", "</longcat_tool_call>"),
    "apertus": _tagged(several(KeyedBody, _LIST), "<|tools_prefix|>", "<|tools_suffix|>"),
    "xlam": _XLAM,
    "gigachat3": ToolFormat(
        (Opening("<|message_sep|>\n\nfunction call<|role_sep|>\n", JSON), Opening("<|function_call|>", JSON)),
        drops=("<|message_sep|>",),
    ),
    "minicpm5": ToolFormat(
        (Opening("<function name=", _xml(CDATA_TAGS), keeps_marker=True),), inner_tags=CDATA_TAGS.texts
    ),
    "dots": _xml_format(invoke_tags(), "<dots_function_call>", "</dots_function_call>"),
    "k2_horizon": ToolFormat(
        (
            Opening("<ifm|tool_calls>", after("<ifm|tool_call>", then=_IFM_BODY)),
            Opening("<ifm|tool_call>", _IFM_BODY),
        ),
        ("</ifm|tool_call>", "</ifm|tool_calls>"),
        inner_tags=IFM_TAGS.texts,
    ),
    "kimi_k3": _xml_format(FRAME_TAGS, *_FRAME_TOOLS),
    "inkling": ToolFormat(
        (Opening("<|content_invoke_tool_json|>", JSON),),
        ("<|end_message|>",),
        drops=("<|end_message|>",),
    ),
    "plamo3": ToolFormat(
        (
            Opening("<|plamo:begin_tool_requests:plamo|>", after(_PLAMO_CALL, then=_named(*_PLAMO_STEPS))),
            Opening(_PLAMO_CALL, _named(*_PLAMO_STEPS)),
        ),
        _PLAMO_ENDS,
        inner_tags=tuple(text for step in _PLAMO_STEPS if isinstance(step, Tag) for text in step.texts),
    ),
    "muse": _xml_format(invoke_tags("atem:"), "<atem:function_calls>", "</atem:function_calls>"),
    "cohere_command3": _tagged(JSON_LIST, "<|START_ACTION|>", "<|END_ACTION|>"),
}
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hermes": (
        "qwen3_json", "qwen3_xml", "qwen3_coder", "nemotron_v3", "step3p5", "step5", "granite4", "ernie45",
        "granite_thinking_parser",
    ),
    "glm45": ("glm47", "ling3", "poolside_v1", "glm4", "laguna"),
    "hy_v3": ("hy_v4",),
    "openai": ("openai_gptoss", "gpt_oss", "harmony"),
    "llama3_json": ("llama4_json", "llama", "llama3", "llama4"),
    "hunyuan_a13b": ("jamba",),
    "cohere_command3": ("cohere_command4",),
    "muse": ("muse_glimmer", "musespark1x"),
    "kimi_k2": ("kimi",),
    "minimax_m2": ("minimax",),
}  # fmt: skip
TOOL_FORMATS |= {alias: TOOL_FORMATS[name] for name, aliases in _ALIASES.items() for alias in aliases}
