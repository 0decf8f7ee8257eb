"""Layouts of tool calls that several families share: for one set of tags, how calls are read and how they are written.

Knows no family.
"""

from dataclasses import replace
from functools import partial

from .bodies import Body, BodyContext, NewBody
from .bodies.compose import Listing, Name, Step, StepsBody, after, several
from .bodies.expression_body import PYTHON, Dialect, ExpressionBody
from .bodies.json_body import JsonBody, ObjectBody
from .bodies.xml_body import XmlBody, XmlTags
from .family import Calls, Opening, Place, ToolFormat
from .spelling import CallKind, ExpressionCall, JsonCall, Spelling, XmlCall

LIST = Listing(separators=",", opener="[", closer="]")
PURE_LIST = replace(LIST, needs_opener=True)
IN_A_ROW = Listing()

JSON: NewBody = JsonBody
BARE_JSON: NewBody = partial(JsonBody, is_bare=True)
KEYED_JSON: NewBody = partial(JsonBody, is_keyed=True)
JSON_LIST = several(JSON, LIST)


def between(body: NewBody, open: str, *closes: str, inner: tuple[str, ...] = ()) -> ToolFormat:
    return ToolFormat((Opening(open, body),), closes, inner_tags=inner)


def bare(body: NewBody, marker: str, place: Place = Place.OUTSIDE_REASONING) -> Opening:
    """Calls without a tag before them: `marker` is their own first text, which the body reads again."""
    return Opening(marker, body, place, keeps_marker=True)


def one_a_line(reads: ToolFormat, kind: CallKind, open: str, close: str) -> Calls:
    """Each call in tags of its own, one a line."""
    return Calls(reads, (Spelling(kind, open, close, between="\n"),))


def one_a_reply(kind: CallKind, open: str, close: str, drops: tuple[str, ...] = ()) -> Calls:
    """One JSON call in tags, after which the reply ends."""
    reads = replace(between(JSON, open, close), drops=drops)
    return Calls(reads, (Spelling(kind, open, close, is_single=True),))


def json_list(open: str, close: str = "", kind: CallKind | None = None, body: NewBody = JSON_LIST) -> Calls:
    """A JSON list of calls in tags; a model may leave the brackets out."""
    spelling = Spelling(kind or JsonCall(), between=", ", begin=f"{open}[", end=f"]{close}")
    return Calls(between(body, open, *([close] if close else [])), (spelling,))


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
    return Calls(xml_format(tags, open, close), (Spelling(call, begin=f"{open}\n", close="\n", end=close),))


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


def kimi_body(context: BodyContext, names: list[str]) -> Body:
    """The name carries the number of the call; the two together are the call's id."""
    written = names[0]
    name, _, number = written.removeprefix("functions.").rpartition(":")
    return ObjectBody(context, name if name and number.isdecimal() else written, call_id=written)


def mistral_body(context: BodyContext, names: list[str]) -> Body:
    """The name, then the call's id if the model wrote one."""
    return ObjectBody(context, names[0], call_id=names[1] if len(names) > 1 else None)


def nested(section: str, section_end: str, call: str, body: NewBody, *closes: str) -> ToolFormat:
    """Calls with tags of their own inside a section; a model may leave the tags of the section out."""
    openings = (Opening(section, after(call, then=body)), Opening(call, body))
    return ToolFormat(openings, (*closes, section_end))


# Calls written as expressions

PYTHON_CALL = partial(ExpressionBody, dialect=PYTHON, opener="(")
PYTHON_CALLS = several(PYTHON_CALL, Listing(separators=",;", opener="[", closer="]"))
BARE_PYTHON = bare(several(PYTHON_CALL, PURE_LIST), "[")


PYTHON_EXPRESSION = ExpressionCall(PYTHON, "(", ")")


def python_list(reads: ToolFormat, open: str = "", close: str = "") -> Calls:
    spelling = Spelling(PYTHON_EXPRESSION, between=", ", begin=f"{open}[", end=f"]{close}")
    return Calls(reads, (spelling,))


def braces(quotes: tuple[str, ...], open: str, close: str) -> Calls:
    """`call:f{a:1}`, one in each pair of tags; strings are quoted by tags of the family's own."""
    dialect = Dialect(quotes, ":", has_escapes=False, has_words=True)
    body = after("call:", then=partial(ExpressionBody, dialect=dialect, opener="{"))
    reads = between(several(body, Listing(separators=",")), open, close, inner=quotes[:1])
    return Calls(reads, (Spelling(ExpressionCall(dialect, "{", "}", ","), f"{open}call:", close),))
