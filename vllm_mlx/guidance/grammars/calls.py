"""How each kind of body spells a call, as grammar: the writing side of `formats/bodies`."""

import html
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ...core.errors import InvalidParameter
from ...formats.bodies.expression_body import Dialect
from ...formats.bodies.xml_tags import XmlTags
from .lark import LarkWriter, either, literal
from .literals import Literals
from .shapes import GuidedTool, ObjectShape, object_shapes, separated
from .values import Values

_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class CallKind(Protocol):
    """One way to write a call."""

    def call(self, tool: GuidedTool, writer: LarkWriter, close: str) -> str:
        """The expression of one call to the tool, up to and with `close`."""
        ...


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": "f", "arguments": {…}}`"""

    arguments: str = "arguments"
    name: str = "name"

    def call(self, tool: GuidedTool, writer: LarkWriter, close: str) -> str:
        before = f'{{"{self.name}": {json.dumps(tool.name)}, "{self.arguments}": '
        return f"{writer.plain(before)} {writer.json(tool.parameters)} {writer.text('}' + close)}"


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """`{"f": {…}}`"""

    def call(self, tool: GuidedTool, writer: LarkWriter, close: str) -> str:
        before = f"{{{json.dumps(tool.name)}: "
        return f"{writer.plain(before)} {writer.json(tool.parameters)} {writer.text('}' + close)}"


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The name between two texts, then the arguments as JSON. `numbers`: a number and `after` stand behind the name."""

    before: str = ""
    behind: str = ""
    trailer: str = ""
    is_numbered: bool = False

    def call(self, tool: GuidedTool, writer: LarkWriter, close: str) -> str:
        number = '":" /[0-9]{1,2}/' if self.is_numbered else ""
        head = f"{writer.text(self.before)} {writer.plain(tool.name)} {number} {writer.text(self.behind)}"
        return f"{head} {writer.json(tool.parameters)} {writer.text(self.trailer + close)}".strip()


@dataclass(frozen=True, slots=True)
class XmlCall:
    """A tag for each argument. `breaks`: where line breaks stand, of `head`, `key`, `value`, `parameter`."""

    tags: XmlTags
    breaks: frozenset[str] = frozenset()
    name_key: str = "name"  # the attribute that holds the name of the call
    kind: str = ""  # the attribute, or tag, that tells the type: "string" or "type"

    def call(self, tool: GuidedTool, writer: LarkWriter, close: str) -> str:
        tags, values = self.tags, Values(writer, tool.parameters, tool.param)
        head = f"{self._head(tags.function, self.name_key, tool.name)}{self._break('head')}" if tags.function else ""
        name = writer.text(head) if head else f"{writer.plain(tool.name)} {writer.text(self._break('head'))}"
        without = (tags.end_parameter, tags.end_function, tags.parameter, close.strip())
        shapes = [" ".join(self._parameters(shape, tool, values, writer, without)) for shape in _shapes(tool, writer)]
        body = either(shapes) if len(shapes) > 1 else shapes[0]
        return f"{name} {body} {writer.text(tags.end_function + close)}".strip()

    def _parameters(
        self, shape: ObjectShape, tool: GuidedTool, values: Values, writer: LarkWriter, without: Iterable[str]
    ) -> Iterable[str]:
        for key, schema, is_required in shape.arguments:
            path = f"{tool.param}.properties.{key}"
            expression = self._parameter(writer.plain(self._key(key)), schema, path, values, writer, without)
            writer.spend(expression)
            yield expression if is_required else f"({expression})?"
        if shape.others is not None:
            path = f"{tool.param}.additionalProperties"
            expression = self._parameter(writer.terminal(_ANY_KEY), shape.others, path, values, writer, without)
            yield f"({writer.rule(expression)})*"

    def _parameter(
        self, key: str, schema: Any, path: str, values: Values, writer: LarkWriter, without: Iterable[str]
    ) -> str:
        tags = self.tags
        end = self._break("value") + tags.end_parameter + self._break("parameter")
        written = values.value(schema, path, end, without=without, tells_type=bool(self.kind))
        options = [f"{self._open(key, is_text, writer)} {value}" for is_text, value in written]
        return either(options) if len(options) > 1 else options[0]

    def _open(self, key: str, is_text: bool, writer: LarkWriter) -> str:
        tags, kind = self.tags, self._kind(is_text)
        if not tags.has_attributes:
            typed = writer.text(f"{tags.type}{kind}{tags.end_type}") if self.kind else ""
            before, after = writer.text(tags.parameter), writer.text(tags.head_end + self._break("key"))
            value = writer.text(tags.value + self._break("value"))
            return " ".join(part for part in (before, key, after, typed, value) if part)
        attribute = "key" if self.name_key == "tool" else "name"
        before = writer.text(f'{tags.parameter} {attribute}="')
        after = writer.text(f'"{f" {self.kind}=" + chr(34) + kind + chr(34) if self.kind else ""}{tags.head_end}')
        return f"{before} {key} {after}"

    def _kind(self, is_text: bool) -> str:
        if self.kind == "string":
            return "true" if is_text else "false"
        return "string" if is_text else "object"

    def _head(self, tag: str, attribute: str, name: str) -> str:
        if not self.tags.has_attributes:
            return f"{tag}{name}{self.tags.head_end}"
        return f'{tag} {attribute}="{html.escape(name)}"{self.tags.head_end}'

    def _key(self, key: str) -> str:
        return html.escape(key) if self.tags.has_attributes else key

    def _break(self, place: str) -> str:
        return "\n" if place in self.breaks else ""


@dataclass(frozen=True, slots=True)
class NestedXmlCall:
    """An element for each argument, every tag behind a prefix. What is no text is JSON inside of its element."""

    prefix: str

    def call(self, tool: GuidedTool, writer: LarkWriter, close: str) -> str:
        values = Values(writer, tool.parameters, tool.param)
        shapes = [" ".join(self._elements(shape, tool, values, writer)) for shape in _shapes(tool, writer)]
        body = either(shapes) if len(shapes) > 1 else shapes[0]
        head = writer.text(f'{self.prefix}<invoke name="{tool.name}">')
        return f"{head} {body} {writer.text(f'{self.prefix}</invoke>{close}')}"

    def _elements(self, shape: ObjectShape, tool: GuidedTool, values: Values, writer: LarkWriter) -> Iterable[str]:
        for key, schema, is_required in shape.arguments:
            path = f"{tool.param}.properties.{key}"
            end = f"{self.prefix}</{key}>"
            options = [value for _, value in values.value(schema, path, end, without=(self.prefix,))]
            expression = f"{writer.text(f'{self.prefix}<{key}>')} {either(options)}"
            writer.spend(expression)
            yield expression if is_required else f"({expression})?"


@dataclass(frozen=True, slots=True)
class ExpressionCall:
    """`f(a=1, b="x")`, `f{a:1}`: arguments as literals of the dialect."""

    dialect: Dialect
    opener: str
    closer: str
    separator: str = ", "

    def call(self, tool: GuidedTool, writer: LarkWriter, close: str) -> str:
        values = Values(writer, tool.parameters, tool.param)
        literals = Literals(values, writer, self.dialect.quotes[0])
        shapes = [self._arguments(shape, tool, values, literals, writer) for shape in _shapes(tool, writer)]
        body = either(shapes) if len(shapes) > 1 else shapes[0]
        return f"{writer.plain(tool.name + self.opener)} {body} {writer.text(self.closer + close)}"

    def _arguments(
        self, shape: ObjectShape, tool: GuidedTool, values: Values, literals: Literals, writer: LarkWriter
    ) -> str:
        written = []
        for key, schema, is_required in shape.arguments:
            path = f"{tool.param}.properties.{key}"
            if self.dialect.has_escapes:
                value = values.json(schema, json_allowed_escapes='nrtbf\\"u')
            else:
                value = literals.value(schema, path)
            written.append((f"{writer.plain(key + self.dialect.assign)} {value}", is_required))
        return separated(written, literal(self.separator), writer)


def _shapes(tool: GuidedTool, writer: LarkWriter) -> list[ObjectShape]:
    shapes = object_shapes(tool.parameters, tool.param, writer.budget)
    if not shapes:
        raise InvalidParameter(f"`{tool.param}` allows no arguments at all.", param=tool.param)
    return shapes
