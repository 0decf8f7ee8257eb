"""Writes grammars of the calls that a reply must or may make, by the spellings in the families' table."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...core.errors import InvalidParameter
from ...formats.call_formats import GENERIC
from ...formats.family import (
    Calls,
    ExpressionCall,
    Header,
    JsonCall,
    NamedCall,
    NestedXmlCall,
    Place,
    XmlCall,
    argument_frame,
    call_frame,
)
from .carried import CarriedKeys
from .guide_grammar import grammars
from .json_schema import refused
from .lark import TEXT, LarkWriter, either, interrupted_text, literal, optional
from .shapes import JOINING, GuidedTool, ObjectShape, object_shapes, separated
from .values import Literals, Values

MAX_CALLS = 8  # in a reply that has to make some: a weak model would never stop
_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class CallsWriter:
    """Writes calls as the spelling of a format that the tokenizer allows.

    `tools`: those that may be called. `most`: the number of calls, by default MAX_CALLS.
    """

    def __init__(self, format: Calls, writer: LarkWriter):
        self._format = format
        self._written = format.spelling(writer.tokens.texts)
        self._kind = self._written.kind
        self._writer = writer
        self._keys = CarriedKeys(format, writer.tokens)

    def calls(self, tools: Sequence[GuidedTool], most: int | None) -> str:
        """Return an expression for one or several calls."""
        return f"{self._writer.text(self._written.begin)} {self._section(tools, most)}".strip()

    def required(self, tools: Sequence[GuidedTool], header: Header, most: int | None) -> str:
        """Write the grammar of a reply that makes calls and says nothing else."""
        start = f"{optional(self._writer.text(header.lead))} {self.calls(tools, most)}".strip()
        return grammars(self._writer.build(start), own_name="calls")

    def in_text(self, tools: Sequence[GuidedTool], header: Header, most: int | None) -> str:
        """Write the grammar of free text in which text that begins like a call is a call."""
        writer = self._writer
        if header.answer:  # here, a call is a separate message
            answer = f"{writer.text(header.answer)} ({writer.terminal(TEXT)})?"
            start = f"{optional(writer.text(header.lead))} {either((answer, self.calls(tools, most)))}".strip()
        elif not self._written.marker:
            text = writer.terminal(f"({TEXT}) & ~/\\s*[{{\\[<](?s:.*)/")
            start = f"({self.calls(tools, most)} | {text})?"
        else:
            start = self._interrupted(tools, most)
        return grammars(writer.build(start))

    def _interrupted(self, tools: Sequence[GuidedTool], most: int | None) -> str:
        marker, begin = self._written.marker, self._written.begin
        if begin:
            body = f"{self._writer.text(begin[len(marker) :])} {self._section(tools, most)}"
        else:
            body = self._section(tools, most, without_first=marker)
        others = [tag for tag in self._other_markers() if tag not in marker and marker not in tag]
        return interrupted_text(
            {marker: body}, self._writer, without=others, most="?" if self._most(most) == 1 else "*"
        )

    def _section(self, tools: Sequence[GuidedTool], most: int | None, without_first: str = "") -> str:
        """Write the calls of a section, without its `begin`. `without_first`: the part of `open` written already."""
        written, writer, most = self._written, self._writer, self._most(most)
        call = writer.rule(either(map(self.call, tools)))
        first = f"{writer.text(written.open[len(without_first) :])} {call}".strip()
        more = f"{writer.text(written.between)} {writer.text(written.open)} {call}".strip()
        others = f"({more}){{0,{most - 1}}}" if most > 1 else ""
        return f"{first} {others} {writer.text(written.end)}".strip()

    def _most(self, most: int | None) -> int:
        return 1 if self._written.is_single else MAX_CALLS if most is None else most

    def _other_markers(self) -> Iterable[str]:
        """Return tags that the parser would read as the start of a call if they occurred as text."""
        for reads in (self._format.reads, GENERIC):
            for opening in reads.openings:
                if opening.place is not Place.AT_START and len(opening.marker) > 1:
                    yield opening.marker

    # One call

    def call(self, tool: GuidedTool) -> str:
        """Return an expression for one call to the tool, up to and including the tag that closes it.

        Raises InvalidParameter for arguments that this format cannot hold, if nothing of them may be left out.
        """
        mark = self._writer.mark()
        try:
            return self._call(tool)
        except InvalidParameter:
            if tool.is_fixed:
                raise
        self._writer.go_back(mark)
        return self.call(tool.looser(self._writer.budget))

    def _call(self, tool: GuidedTool) -> str:
        frame, writer = call_frame(self._kind, tool.name), self._writer
        number = '":" /[0-9]{1,2}/' if frame.is_numbered else ""
        parts = (writer.text(frame.before), writer.plain(frame.name), number, writer.text(frame.behind))
        head = " ".join(filter(None, parts))
        return f"{head} {self._arguments(tool)} {writer.text(frame.end + self._written.close)}".strip()

    def _arguments(self, tool: GuidedTool) -> str:
        if isinstance(self._kind, JsonCall | NamedCall):
            return self._writer.json(tool.parameters)
        parameters = tool.parameters
        if tool.held != "all":
            parameters = {keyword: value for keyword, value in parameters.items() if keyword not in JOINING}
        shapes = object_shapes(parameters, tool.param, self._writer.budget, self._keys)
        if not shapes:
            raise refused(tool.param, " allows no arguments at all.")
        values = Values(self._writer, tool.parameters, tool.param)
        if isinstance(self._kind, ExpressionCall):
            literals = Literals(values, self._writer, self._kind.dialect.quotes[0], self._keys)
            return _one_of([self._expressions(shape, self._kind, values, literals, tool.param) for shape in shapes])
        return _one_of([" ".join(self._elements(shape, values, tool.param)) for shape in shapes])

    # Arguments, each in its own pair of tags

    def _elements(self, shape: ObjectShape, values: Values, param: str) -> Iterable[str]:
        for key, schema, is_required in shape.arguments:
            expression = self._element(key, schema, f"{param}.properties.{key}", values)
            self._writer.spend(expression)
            yield expression if is_required else f"({expression})?"
        if shape.others is not None and isinstance(self._kind, XmlCall):
            expression = self._element(None, shape.others, f"{param}.additionalProperties", values)
            yield f"({self._writer.rule(expression)})*"

    def _element(self, key: str | None, schema: Any, path: str, values: Values) -> str:
        """Write the argument `key`, or any argument if `key` is None."""
        end = argument_frame(self._kind, key or "").end
        tells_type = isinstance(self._kind, XmlCall) and bool(self._kind.kind)
        written = values.value(schema, path, end, without=self._barred, tells_type=tells_type)
        return _one_of([f"{self._open(key, is_text)} {value}" for is_text, value in written])

    def _open(self, key: str | None, is_text: bool) -> str:
        writer, frame = self._writer, argument_frame(self._kind, key or "", is_text=is_text)
        name = writer.terminal(_ANY_KEY) if key is None else writer.plain(frame.name)
        return f"{writer.text(frame.before)} {name} {writer.text(frame.behind)}"

    @property
    def _barred(self) -> tuple[str, ...]:
        """Return the tags that a value must not contain."""
        if not isinstance(self._kind, XmlCall):
            return (self._kind.prefix,) if isinstance(self._kind, NestedXmlCall) else ()
        tags = self._kind.tags
        return tags.end_parameter, tags.end_function, tags.parameter, self._written.close.strip()

    def _expressions(
        self, shape: ObjectShape, kind: ExpressionCall, values: Values, literals: Literals, param: str
    ) -> str:
        """Write the arguments as names and literals."""

        def value(schema: Any, path: str) -> str:
            is_json = kind.dialect.has_escapes
            return values.json(schema, json_allowed_escapes='nrtbf\\"u') if is_json else literals.value(schema, path)

        writer, separator = self._writer, literal(kind.separator)
        if shape.others is not None:
            other = value(shape.others, f"{param}.additionalProperties")
            one = writer.rule(f"{writer.terminal(_ANY_KEY)} {writer.plain(argument_frame(kind, '').behind)} {other}")
            return f"({one} ({separator} {one})*)?"
        written = []
        for key, schema, is_required in shape.arguments:
            frame, expression = argument_frame(kind, key), value(schema, f"{param}.properties.{key}")
            written.append((f"{writer.plain(frame.name + frame.behind)} {expression}", is_required))
        return separated(written, separator, writer)


def _one_of(options: list[str]) -> str:
    return either(options) if len(options) > 1 else options[0]
