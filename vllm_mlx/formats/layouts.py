"""Layouts of reasoning and of tool calls: for one set of tags, how each is read and how calls are written.

Knows no family, but for formats of reasoning that several families share.
"""

from dataclasses import replace
from functools import partial

from .bodies import Body, BodyContext, NewBody
from .bodies.compose import Listing, Name, Step, StepsBody, after, harmony_route, header, recipient_route, several
from .bodies.expression_body import PYTHON, Dialect, ExpressionBody
from .bodies.json_body import JsonBody, ObjectBody
from .bodies.xml_body import XmlBody, XmlTags
from .family import (
    CallKind,
    Calls,
    ExpressionCall,
    JsonCall,
    Opening,
    Place,
    ReasoningFormat,
    ReasoningTags,
    Spelling,
    ToolFormat,
    XmlCall,
)

Tags = tuple[str, str]  # an opening and a closing tag

LIST = Listing(separators=",", opener="[", closer="]")
PURE_LIST = replace(LIST, needs_opener=True)
IN_A_ROW = Listing()
SEPARATED = Listing(separators=";,")

JSON: NewBody = JsonBody
BARE_JSON: NewBody = partial(JsonBody, is_bare=True)
KEYED_JSON: NewBody = partial(JsonBody, is_keyed=True)
JSON_LIST = several(JSON, LIST)


def between(body: NewBody, open: str, *closes: str, inner: tuple[str, ...] = ()) -> ToolFormat:
    return ToolFormat((Opening(open, body),), closes, inner_tags=inner)


def bare(body: NewBody, marker: str, place: Place = Place.OUTSIDE_REASONING) -> Opening:
    """Calls without a tag before them: `marker` is their own first text, which the body reads again."""
    return Opening(marker, body, place, keeps_marker=True)


def one_a_line(reads: ToolFormat, kind: CallKind, line: str = "\n") -> Calls:
    """Each call in tags of its own, one a line; `line` also separates it from its tags."""
    open, close = reads.openings[0].marker, reads.closes[0]
    return Calls(reads, (Spelling(kind, open + line, line + close, between="\n"),))


def one_a_reply(kind: CallKind, open: str, close: str, drops: tuple[str, ...] = ()) -> Calls:
    """One JSON call in tags, after which the reply ends."""
    reads = replace(between(JSON, open, close), drops=drops)
    return Calls(reads, (Spelling(kind, open, close, is_single=True),), sign=open)


def json_list(open: str, close: str = "", kind: CallKind | None = None, body: NewBody = JSON_LIST) -> Calls:
    """A JSON list of calls in tags; a model may leave the brackets out."""
    spelling = Spelling(kind or JsonCall(), between=", ", begin=f"{open}[", end=f"]{close}")
    return Calls(between(body, open, *([close] if close else [])), (spelling,), sign=open)


def section(
    section: Tags, call: Tags, body: NewBody, kind: CallKind, inner: tuple[str, ...], *, head: str = "", line: str = ""
) -> Calls:
    """Calls with tags of their own inside the tags of a section, which a model may leave out.

    `head`: follows the opening tag of a call; `line`: separates the calls.
    """
    first = after(head, then=body) if head else body
    openings = (Opening(section[0], after(call[0], then=first)), Opening(call[0], first))
    spelling = Spelling(kind, call[0] + head, call[1], line, begin=section[0] + line, end=line + section[1])
    return Calls(ToolFormat(openings, (call[1], section[1]), inner_tags=inner), (spelling,))


# Calls with a tag for each argument

FUNCTION_TAGS = XmlTags(
    parameter="<parameter=",
    end_parameter="</parameter>",
    function="<function=",
    end_function="</function>",
    trims_breaks=True,
)
VERBATIM_TAGS = replace(FUNCTION_TAGS, trims_breaks=False)
ARG_KEY_TAGS = XmlTags(parameter="<arg_key>", end_parameter="</arg_value>", head_end="</arg_key>", value="<arg_value>")


def invoke_tags(prefix: str = "") -> XmlTags:
    return XmlTags(
        parameter=f"<{prefix}parameter",
        end_parameter=f"</{prefix}parameter>",
        function=f"<{prefix}invoke",
        end_function=f"</{prefix}invoke>",
        has_attributes=True,
    )


def xml(tags: XmlTags) -> NewBody:
    return several(partial(XmlBody, tags=tags), IN_A_ROW)


def xml_format(tags: XmlTags, open: str, *closes: str) -> ToolFormat:
    """Calls in a row between `open` and `closes`; a model may leave `open` out."""
    alone = Opening(tags.function, xml(tags), keeps_marker=True, needs_tools=True)
    return ToolFormat((Opening(open, xml(tags)), alone), closes, inner_tags=tags.texts)


def xml_section(tags: XmlTags, open: str, close: str, kind: str = "") -> Calls:
    """Each call on lines of its own inside one pair of tags."""
    call = XmlCall(tags, frozenset({"head", "parameter"}), kind=kind)
    return Calls(xml_format(tags, open, close), (Spelling(call, begin=f"{open}\n", close="\n", end=close),), sign=open)


def dsml(section: str, space: str = "") -> Calls:
    """DeepSeek's markup, every tag behind one token."""
    tags = invoke_tags(f"｜DSML｜{space}")
    return xml_section(tags, f"<｜DSML｜{section}>", f"</｜DSML｜{section}>", kind="string")


FUNCTION = xml(FUNCTION_TAGS)
FUNCTION_CALL = XmlCall(FUNCTION_TAGS, frozenset({"head", "value", "parameter"}))


def keyed(tags: XmlTags, *steps: Step) -> NewBody:
    """The name, then a key and a value for each argument."""

    def finish(context: BodyContext, names: list[str]) -> Body:
        return XmlBody(context, tags, names[0])

    return partial(StepsBody, steps=(Name(), *steps), finish=finish)


ARG_KEY = keyed(ARG_KEY_TAGS)
ARG_KEY_CALL = XmlCall(ARG_KEY_TAGS, frozenset({"head", "key", "parameter"}))


# Calls with the name before a JSON object


def named(*steps: Step, trailer: str = "") -> NewBody:
    def finish(context: BodyContext, names: list[str]) -> Body:
        return ObjectBody(context, names[0].removeprefix("functions."), trailer=trailer)

    return partial(StepsBody, steps=steps, finish=finish)


# Calls written as expressions

PYTHON_CALL = partial(ExpressionBody, dialect=PYTHON, opener="(")
PYTHON_CALLS = several(PYTHON_CALL, Listing(separators=",;", opener="[", closer="]"))
BARE_PYTHON = bare(several(PYTHON_CALL, PURE_LIST), "[")
PYTHON_EXPRESSION = ExpressionCall(PYTHON, "(", ")")


def python_list(reads: ToolFormat, open: str = "", close: str = "") -> Calls:
    spelling = Spelling(PYTHON_EXPRESSION, between=", ", begin=f"{open}[", end=f"]{close}")
    return Calls(reads, (spelling,), sign=open)


def braces(quotes: tuple[str, ...], open: str, close: str) -> Calls:
    """`call:f{a:1}`, one in each pair of tags; strings are quoted by tags of the family's own."""
    dialect = Dialect(quotes, ":", has_escapes=False, has_words=True)
    body = after("call:", then=partial(ExpressionBody, dialect=dialect, opener="{"))
    reads = between(several(body, Listing(separators=",")), open, close, inner=quotes[:1])
    return Calls(reads, (Spelling(ExpressionCall(dialect, "{", "}", ","), f"{open}call:", close),), sign=open)


# Reasoning


def tags(open: str, *closes: str) -> ReasoningFormat:
    return ReasoningFormat((open,), closes, sign=open)


THINK = ReasoningFormat(("<think>",), ("</think>",))
ALWAYS = replace(THINK, is_implied=True)

_MESSAGE = "<|message|>"
_HARMONY_HEADER = header(_MESSAGE, harmony_route)
HARMONY = ReasoningFormat(
    opens=(),
    closes=("<|end|>", "<|return|>"),
    headers=(
        Opening("<|channel|>", _HARMONY_HEADER),
        Opening("<|start|>", _HARMONY_HEADER),
        Opening("to=functions.", _HARMONY_HEADER, Place.AT_START, keeps_marker=True),
    ),
    header_tags=(_MESSAGE, "<|constrain|>"),
    headed=ReasoningTags(
        starts=("<|channel|>analysis<|message|>",),
        ends=("<|end|>",),
        atoms=("<|end|>",),
        lead="<|start|>assistant",
        answer="<|channel|>final<|message|>",
    ),
)
_RECIPIENT_HEADER = header(_MESSAGE, recipient_route)
MUSE = ReasoningFormat(
    opens=(),
    closes=("<|eom|>", "<|eot|>"),
    headers=(
        Opening("<|start|>", _RECIPIENT_HEADER),
        Opening("to=", _RECIPIENT_HEADER, Place.AT_START, keeps_marker=True),
        Opening("assistant to=", _RECIPIENT_HEADER, Place.AT_START, keeps_marker=True),
    ),
    header_tags=(_MESSAGE,),
    headed=ReasoningTags(
        starts=("to=self<|message|>",),
        ends=("<|eom|>",),
        atoms=("<|eom|>",),
        lead="<|start|>assistant",
        answer=" to=user<|message|>",
    ),
)
