"""Writes grammars of the calls that a reply must or may make, by the spellings in the families' table."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from ...formats.call_frame import call_frame
from ...formats.families import CallChoice, call_format, spelling
from ...formats.family import (
    CallKind,
    ExpressionCall,
    Header,
    JsonCall,
    NamedCall,
    NestedXmlCall,
    Place,
    Spelling,
    XmlCall,
)
from .guide_grammar import grammars
from .json_schema import refused
from .lark import TEXT, LarkWriter, either, interrupted_text, literal, optional
from .shapes import GuidedTool, ObjectShape, object_shapes, separated
from .values import Literals, Values

MAX_CALLS = 8  # in a reply that has to make some: a weak model would never stop
_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def calls(tools: Sequence[GuidedTool], choice: CallChoice, writer: LarkWriter, most: int | None) -> str:
    """Return an expression for one or several calls. `choice`: the format; `most`: calls, None: MAX_CALLS."""
    written = spelling(choice, writer.token_texts)
    return f"{writer.text(written.begin)} {_section(tools, written, writer, _most(written, most))}".strip()


def required_calls(
    tools: Sequence[GuidedTool], choice: CallChoice, writer: LarkWriter, header: Header, most: int | None
) -> str:
    """Write the grammar of a reply that makes calls and says nothing else."""
    start = f"{optional(writer.text(header.lead))} {calls(tools, choice, writer, most)}".strip()
    return grammars(writer.build(start))


def calls_in_text(
    tools: Sequence[GuidedTool], choice: CallChoice, writer: LarkWriter, header: Header, most: int | None
) -> str:
    """Write the grammar of free text in which text that begins like a call is a call."""
    written = spelling(choice, writer.token_texts)
    most = _most(written, most)
    if header.answer:  # a call is a message of its own here
        answer = f"{writer.text(header.answer)} ({writer.terminal(TEXT)})?"
        start = f"{optional(writer.text(header.lead))} {either((answer, calls(tools, choice, writer, most)))}"
        return grammars(writer.build(start.strip()))
    if not written.marker:
        text = writer.terminal(f"({TEXT}) & ~/\\s*[{{\\[<](?s:.*)/")
        return grammars(writer.build(f"({calls(tools, choice, writer, most)} | {text})?"))
    return grammars(writer.build(_interrupted(tools, choice, written, writer, most)))


def _interrupted(
    tools: Sequence[GuidedTool], choice: CallChoice, written: Spelling, writer: LarkWriter, most: int
) -> str:
    marker = written.marker
    if written.begin:
        body = f"{writer.text(written.begin[len(marker) :])} {_section(tools, written, writer, most)}"
    else:
        body = _section(tools, written, writer, most, without_first=marker)
    others = [tag for tag in _other_markers(choice) if tag not in marker and marker not in tag]
    return interrupted_text({marker: body}, writer, without=others, most="?" if most == 1 else "*")


def _section(
    tools: Sequence[GuidedTool], written: Spelling, writer: LarkWriter, most: int, without_first: str = ""
) -> str:
    """Write the calls of a section, without its `begin`. `without_first`: the part of `open` written already."""
    call = writer.rule(either(call_expression(written.kind, tool, writer, written.close) for tool in tools))
    first = f"{writer.text(written.open[len(without_first) :])} {call}".strip()
    more = f"{writer.text(written.between)} {writer.text(written.open)} {call}".strip()
    others = f"({more}){{0,{most - 1}}}" if most > 1 else ""
    return f"{first} {others} {writer.text(written.end)}".strip()


def _most(written: Spelling, most: int | None) -> int:
    return 1 if written.is_single else MAX_CALLS if most is None else most


def _other_markers(choice: CallChoice) -> Iterable[str]:
    """Return tags that the parser would read as the start of a call if they occurred as text."""
    for format in (call_format(choice).reads, call_format("generic").reads):
        for opening in format.openings:
            if opening.place is not Place.AT_START and len(opening.marker) > 1:
                yield opening.marker


# One call


def call_expression(kind: CallKind, tool: GuidedTool, writer: LarkWriter, close: str) -> str:
    """Return an expression for one call to the tool, up to and including `close`."""
    frame = call_frame(kind, tool.name)
    number = '":" /[0-9]{1,2}/' if frame.is_numbered else ""
    parts = (writer.text(frame.before), writer.plain(frame.name), number, writer.text(frame.behind))
    head = " ".join(filter(None, parts))
    return f"{head} {_arguments(kind, tool, writer, close)} {writer.text(frame.end + close)}".strip()


def _arguments(kind: CallKind, tool: GuidedTool, writer: LarkWriter, close: str) -> str:
    match kind:
        case JsonCall() | NamedCall():
            return writer.json(tool.parameters)
        case XmlCall():
            return _XmlWriter(kind, tool, writer, close).arguments()
        case NestedXmlCall():
            return _nested_xml_arguments(kind.prefix, tool, writer)
        case ExpressionCall():
            return _expression_arguments(kind, tool, writer)


def _nested_xml_arguments(prefix: str, tool: GuidedTool, writer: LarkWriter) -> str:
    values = Values(writer, tool.parameters, tool.param)

    def elements(shape: ObjectShape) -> Iterable[str]:
        for key, schema, is_required in shape.arguments:
            path = f"{tool.param}.properties.{key}"
            options = [value for _, value in values.value(schema, path, f"{prefix}</{key}>", without=(prefix,))]
            expression = f"{writer.text(f'{prefix}<{key}>')} {either(options)}"
            writer.spend(expression)
            yield expression if is_required else f"({expression})?"

    return _one_of([" ".join(elements(shape)) for shape in _shapes(tool, writer)])


def _expression_arguments(kind: ExpressionCall, tool: GuidedTool, writer: LarkWriter) -> str:
    dialect, values = kind.dialect, Values(writer, tool.parameters, tool.param)
    literals = Literals(values, writer, dialect.quotes[0])

    def arguments(shape: ObjectShape) -> str:
        written = []
        for key, schema, is_required in shape.arguments:
            if dialect.has_escapes:
                value = values.json(schema, json_allowed_escapes='nrtbf\\"u')
            else:
                value = literals.value(schema, f"{tool.param}.properties.{key}")
            written.append((f"{writer.plain(key + dialect.assign)} {value}", is_required))
        return separated(written, literal(kind.separator), writer)

    return _one_of([arguments(shape) for shape in _shapes(tool, writer)])


class _XmlWriter:
    """Writes the arguments of one call, a tag for each."""

    def __init__(self, kind: XmlCall, tool: GuidedTool, writer: LarkWriter, close: str):
        self._kind = kind
        self._tags = tags = kind.tags
        self._tool = tool
        self._writer = writer
        self._values = Values(writer, tool.parameters, tool.param)
        self._without = (tags.end_parameter, tags.end_function, tags.parameter, close.strip())

    def arguments(self) -> str:
        return _one_of([" ".join(self._parameters(shape)) for shape in _shapes(self._tool, self._writer)])

    def _parameters(self, shape: ObjectShape) -> Iterable[str]:
        writer, param = self._writer, self._tool.param
        for key, schema, is_required in shape.arguments:
            written = html.escape(key) if self._tags.has_attributes else key
            expression = self._parameter(writer.plain(written), schema, f"{param}.properties.{key}")
            writer.spend(expression)
            yield expression if is_required else f"({expression})?"
        if shape.others is not None:
            expression = self._parameter(writer.terminal(_ANY_KEY), shape.others, f"{param}.additionalProperties")
            yield f"({writer.rule(expression)})*"

    def _parameter(self, key: str, schema: Any, path: str) -> str:
        end = self._break("value") + self._tags.end_parameter + self._break("parameter")
        tells_type = bool(self._kind.kind)
        written = self._values.value(schema, path, end, without=self._without, tells_type=tells_type)
        return _one_of([f"{self._open(key, is_text)} {value}" for is_text, value in written])

    def _open(self, key: str, is_text: bool) -> str:
        tags, writer, kind = self._tags, self._writer, self._type(is_text)
        if not tags.has_attributes:
            typed = writer.text(f"{tags.type}{kind}{tags.end_type}") if kind else ""
            before, after = writer.text(tags.parameter), writer.text(tags.head_end + self._break("key"))
            value = writer.text(tags.value + self._break("value"))
            return " ".join(part for part in (before, key, after, typed, value) if part)
        attribute = "key" if self._kind.name_key == "tool" else "name"
        before = writer.text(f'{tags.parameter} {attribute}="')
        behind = f'" {self._kind.kind}="{kind}"' if kind else '"'
        return f"{before} {key} {writer.text(behind + tags.head_end)}"

    def _type(self, is_text: bool) -> str:
        """Return the type that a tag names; "" if the family's tags name none."""
        match self._kind.kind:
            case "":
                return ""
            case "string":
                return "true" if is_text else "false"
        return "string" if is_text else "object"

    def _break(self, place: str) -> str:
        return "\n" if place in self._kind.breaks else ""


def _one_of(options: list[str]) -> str:
    return either(options) if len(options) > 1 else options[0]


def _shapes(tool: GuidedTool, writer: LarkWriter) -> list[ObjectShape]:
    shapes = object_shapes(tool.parameters, tool.param, writer.budget)
    if not shapes:
        raise refused(tool.param, " allows no arguments at all.")
    return shapes
