"""Layouts of reasoning and of tool calls: how each is read with given tags, and how calls are written with them.

It knows no family, except for formats of reasoning that several families share.
"""

from dataclasses import replace
from functools import partial

from .bodies import NewBody
from .bodies.compose import Listing, after, several
from .bodies.expression_body import ExpressionBody
from .bodies.json_body import JsonBody
from .bodies.literal_scanner import PYTHON, Dialect
from .bodies.message_header import HEADER_TAGS, ChannelBody, harmony_route, header, recipient_route
from .bodies.xml_body import XmlBody
from .bodies.xml_tags import XmlTags
from .family import (
    CallKind,
    Calls,
    ExpressionCall,
    Header,
    JsonCall,
    Opening,
    Place,
    ReasoningFormat,
    ReasoningTags,
    Spelling,
    ToolFormat,
    XmlCall,
)

LIST = Listing(separators=",", opener="[", closer="]")
PURE_LIST = replace(LIST, needs_opener=True)
IN_A_ROW = Listing(separators=",")

JSON: NewBody = JsonBody
KEYED_JSON: NewBody = partial(JsonBody, is_keyed=True)
JSON_LIST = several(JSON, LIST)
JSON_ROW = several(JSON, IN_A_ROW)


def between(body: NewBody, open: str, *closes: str, inner: tuple[str, ...] = ()) -> ToolFormat:
    return ToolFormat((Opening(open, body),), closes, inner_tags=inner)


def one_a_line(reads: ToolFormat, *kinds: CallKind, line: str = "\n") -> Calls:
    """Lay out each call in a pair of tags, one call a line; `line` also separates a call from its tags."""
    open, close = reads.openings[0].marker, reads.closes[0]
    return Calls(reads, tuple(Spelling(kind, open + line, line + close, between="\n") for kind in kinds))


def one_a_reply(kind: CallKind, open: str, close: str) -> Calls:
    """Lay out one JSON call in tags, of which `close` ends any message of the family."""
    reads = replace(between(JSON, open, close), drops=(close,))
    return Calls(reads, (Spelling(kind, open, close, is_single=True),), sign=open)


def enclosed(reads: ToolFormat, kind: CallKind, between: str = "", brackets: str = "") -> Calls:
    """Lay out all calls inside one pair of tags, the first of `reads`, and in brackets if they are given."""
    open, close = reads.openings[0].marker, "".join(reads.closes[:1])
    spelling = Spelling(kind, between=between, begin=open + brackets[:1], end=brackets[1:] + close)
    return Calls(reads, (spelling,), sign=open)


def json_list(open: str, close: str = "", kind: CallKind | None = None, body: NewBody = JSON_LIST) -> Calls:
    """Lay out a JSON list of calls in tags; a model may leave the brackets out."""
    return enclosed(between(body, open, *([close] if close else [])), kind or JsonCall(), ", ", "[]")


# Calls with a tag for each argument

FUNCTION_TAGS = XmlTags("<parameter=", "</parameter>", "<function=", "</function>", trims_breaks=True)


def invoke_tags(prefix: str = "") -> XmlTags:
    return XmlTags(
        f"<{prefix}parameter", f"</{prefix}parameter>", f"<{prefix}invoke", f"</{prefix}invoke>", has_attributes=True
    )


def xml(tags: XmlTags) -> NewBody:
    return several(partial(XmlBody, tags=tags), IN_A_ROW)


def xml_format(tags: XmlTags, open: str, *closes: str) -> ToolFormat:
    """Read calls in a row between `open` and `closes`; a model may leave `open` out."""
    is_common = tags.function in ("<invoke", "<function=")
    alone = Opening(tags.function, xml(tags), keeps_marker=True, needs_tools=is_common)
    return ToolFormat((Opening(open, xml(tags)), alone), closes, inner_tags=tags.texts)


def xml_section(tags: XmlTags, open: str, close: str, kind: str = "") -> Calls:
    """Lay out calls on separate lines inside one pair of tags."""
    call = XmlCall(tags, frozenset({"head", "parameter"}), kind=kind)
    return Calls(xml_format(tags, open, close), (Spelling(call, begin=f"{open}\n", close="\n", end=close),), sign=open)


_DSML = "｜DSML｜"
_DSML_SECTIONS = tuple(f"{_DSML}{section}>" for section in ("function_calls", "tool_calls", " calls"))


def dsml(section: str, space: str = "") -> Calls:
    """Lay out calls in DeepSeek's markup: every tag contains the same token, which is not text even alone.

    The tags that other versions write around their calls are dropped.
    """
    calls = xml_section(invoke_tags(_DSML + space), f"<{_DSML}{section}>", f"</{_DSML}{section}>", kind="string")
    others = tuple(start + tag for start in ("</", "<", "") for tag in _DSML_SECTIONS)
    return replace(calls, reads=replace(calls.reads, inner_tags=(*calls.reads.inner_tags, *others, _DSML)))


FUNCTION_CALL = XmlCall(FUNCTION_TAGS, frozenset({"head", "value", "parameter"}))


# Calls written as expressions

PYTHON_CALL = partial(ExpressionBody, dialect=PYTHON, opener="(")
PYTHON_CALLS = several(PYTHON_CALL, Listing(separators=",;", opener="[", closer="]"))
PYTHON_EXPRESSION = ExpressionCall(PYTHON, "(", ")")


def braces(quotes: tuple[str, ...], open: str, close: str) -> Calls:
    """Lay out calls as `call:f{a:1}`, one in each pair of tags; `quotes` are the family's marks around strings."""
    dialect = Dialect(quotes, ":", has_escapes=False, has_words=True)
    body = after("call:", then=partial(ExpressionBody, dialect=dialect, opener="{"))
    reads = between(several(body, Listing(separators=",")), open, close, inner=quotes[:1])
    return Calls(reads, (Spelling(ExpressionCall(dialect, "{", "}", ","), f"{open}call:", close),), sign=open)


# Reasoning


def tags(open: str, *closes: str) -> ReasoningFormat:
    return ReasoningFormat((open,), closes, sign=open)


THINK = ReasoningFormat(("<think>",), ("</think>",))
ALWAYS = replace(THINK, is_implied=True)


def channels(open: str, usual: str, close: str) -> ReasoningFormat:
    """Return the layout of a channel for reasoning that `open` begins. `usual`: `open` with the family's name."""
    return ReasoningFormat(
        opens=(),
        closes=(close,),
        headers=(Opening(open, partial(ChannelBody, usual=usual.removeprefix(open))),),
        headed=ReasoningTags((usual,), (close,)),
        sign=usual,
    )


HARMONY = ReasoningFormat(
    opens=(),
    closes=("<|end|>", "<|return|>", "<|call|>"),
    headers=(
        Opening("<|channel|>", header(harmony_route, "<|channel|>")),
        Opening("<|start|>", header(harmony_route, "<|start|>")),
        Opening("to=", header(harmony_route), Place.AT_START, keeps_marker=True),
    ),
    header_tags=HEADER_TAGS,
    headed=ReasoningTags(
        starts=("<|channel|>analysis<|message|>",),
        ends=("<|end|>",),
        atoms=("<|end|>",),
        header=Header("<|start|>assistant", "<|channel|>final<|message|>"),
    ),
)
MUSE = ReasoningFormat(
    opens=(),
    closes=("<|eom|>", "<|eot|>"),
    headers=(
        Opening("<|start|>", header(recipient_route, "<|start|>")),
        Opening("to=", header(recipient_route), Place.AT_START, keeps_marker=True),
        Opening("assistant to=", header(recipient_route), Place.AT_START, keeps_marker=True),
    ),
    header_tags=HEADER_TAGS[:2],
    headed=ReasoningTags(
        starts=("to=self<|message|>",),
        ends=("<|eom|>",),
        atoms=("<|eom|>",),
        header=Header("<|start|>assistant", " to=user<|message|>"),
    ),
)
