"""Writes the grammar of a reply in the form that the client asked for."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import shown_field
from ...core.request import Choice, Grammar, Guide, JsonSchema, Regex, StructuralFormat, StructuralTag, TagStructure
from ...formats.family import NO_HEADER, Header
from .json_schema import checked_schema, refused
from .lark import LarkWriter, either, in_slashes, interrupted_text, literal, optional
from .values import ANY_TEXT

_MAX_DEPTH = 32  # formats inside each other
_FIELDS: Mapping[str, tuple[str, ...]] = {  # by the type of a format
    "any_text": (),
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
_INNER = "inner"  # the name of the grammar that a client wrote


def guide_grammar(guide: Guide, writer: LarkWriter, header: Header = NO_HEADER, *, calls: str = "") -> str:
    """Write the grammar. `calls`: an expression of calls that the reply may make instead.

    Raises InvalidParameter for a form that cannot be enforced.
    """
    if isinstance(guide.form, Grammar) and not calls and header == NO_HEADER:
        return grammars(guide.form.text)
    answer = f"{writer.text(header.answer)} {_body(guide, writer)}".strip()
    start = f"{optional(writer.text(header.lead))} {either((answer, calls)) if calls else answer}".strip()
    inner = {_INNER: guide.form.text} if isinstance(guide.form, Grammar) else {}
    return grammars(writer.build(start), **inner)


def _body(guide: Guide, writer: LarkWriter) -> str:
    match guide.form:
        case JsonSchema(schema):
            return writer.json(checked_schema(schema, guide.param, writer.budget))
        case Regex(pattern):
            return f"/{in_slashes(pattern)}/"
        case Choice(options):
            # One lexeme, because as many separate literals would exceed the limit of parser items.
            return writer.terminal(either(map(literal, options)))
        case Grammar():
            return f"@{_INNER}"
        case StructuralTag(structures, triggers):
            return _structures(structures, triggers, guide.param, writer)
        case StructuralFormat(format_):
            return StructuralWriter(writer).expression(format_, f"{guide.param}.format")


def grammars(start: str, own_name: str = "", **others: str) -> str:
    """Return llguidance's JSON for a grammar and the grammars that it refers to by `@name`."""
    own = {"name": own_name} if own_name else {}
    named = [{"name": name, "lark_grammar": text} for name, text in others.items()]
    return json.dumps({"grammars": [{**own, "lark_grammar": start}, *named]}, ensure_ascii=False)


def _structures(structures: Sequence[TagStructure], triggers: Sequence[str], param: str, writer: LarkWriter) -> str:
    """Write free text with structures. A structure belongs to the longest trigger that it begins with."""
    rests: dict[str, list[str]] = {}
    for number, structure in enumerate(structures):
        trigger = max(filter(structure.begin.startswith, triggers), key=len)
        schema = writer.json(checked_schema(structure.schema, f"{param}.structures[{number}].schema", writer.budget))
        rest = writer.text(structure.begin[len(trigger) :])
        rests.setdefault(trigger, []).append(f"{rest} {schema} {writer.text(structure.end)}".strip())
    return interrupted_text({trigger: either(options) for trigger, options in rests.items()}, writer)


class StructuralWriter:
    """Writes one tree. Raises InvalidParameter, naming the place, for a tree that is wrong or cannot be enforced."""

    def __init__(self, writer: LarkWriter):
        self._writer = writer

    def expression(self, format_: Any, path: str, end: str = "", depth: int = _MAX_DEPTH) -> str:
        """Return an expression for the format, then `end`, which free text does not contain."""
        writer = self._writer
        kind = self._field(format_, "type", str, path)
        if depth == 0:
            raise refused(path, " is nested too deeply.")
        if kind != "tag":
            self._check_fields(format_, kind, path)
        match kind:
            case "any_text":
                return writer.value(ANY_TEXT, end, without=(end,)) if end else f"({writer.terminal('/(?s:.+)/')})?"
            case "const_string":
                body = writer.text(self._field(format_, "value", str, path))
            case "json_schema":
                body = writer.json(checked_schema(format_.get("json_schema"), f"{path}.json_schema", writer.budget))
            case "regex":
                body = writer.terminal(f"/{in_slashes(self._field(format_, 'pattern', str, path))}/")
            case "sequence":
                return self._sequence(format_, path, end, depth)
            case "or":
                elements = enumerate(self._field(format_, "elements", list, path))
                return either(self.expression(part, f"{path}.elements[{at}]", end, depth - 1) for at, part in elements)
            case "tag":
                body = self._tag(format_, path, depth)
            case "triggered_tags":
                body = self._triggered(format_, path, depth)
            case "tags_with_separator":
                body = self._separated(format_, path, depth)
            case other:
                raise refused(f"{path}.type", f" '{other}' is not supported.")
        return f"{body} {writer.text(end)}".strip()

    def _sequence(self, format_: Mapping[str, Any], path: str, end: str, depth: int) -> str:
        elements = self._field(format_, "elements", list, path)
        parts = []
        for at, part in enumerate(elements):
            is_last = at == len(elements) - 1
            if not is_last and isinstance(part, Mapping) and part.get("type") in ("any_text", "triggered_tags"):
                raise refused(f"{path}.elements[{at}]", ": free text is allowed only at the end of a sequence.")
            parts.append(self.expression(part, f"{path}.elements[{at}]", end if is_last else "", depth - 1))
        return " ".join(parts) or self._writer.text(end) or '""'

    def _tag(self, format_: Any, path: str, depth: int, *, behind: str = "") -> str:
        """Write a tag. `behind`: the part of `begin` that was already written."""
        begin = self._field(format_, "begin", str, path)[len(behind) :]
        self._check_fields(format_, "tag", path)
        end = self._field(format_, "end", str, path)
        content = self.expression(format_.get("content"), f"{path}.content", end, depth - 1)
        return self._writer.rule(f"{self._writer.text(begin)} {content}".strip())

    def _triggered(self, format_: Mapping[str, Any], path: str, depth: int) -> str:
        triggers = self._field(format_, "triggers", list, path)
        rests: dict[str, list[str]] = {}
        for at, tag in enumerate(self._field(format_, "tags", list, path)):
            begin = self._field(tag, "begin", str, f"{path}.tags[{at}]")
            self._writer.budget.spend(path, len(triggers))
            known = [text for text in triggers if isinstance(text, str) and text and begin.startswith(text)]
            if not known:
                raise refused(f"{path}.tags[{at}].begin", " begins with none of the triggers.")
            trigger = max(known, key=len)
            rests.setdefault(trigger, []).append(self._tag(tag, f"{path}.tags[{at}]", depth, behind=trigger))
        most = "+" if format_.get("at_least_one") else "*"
        if format_.get("stop_after_first"):
            most = "" if format_.get("at_least_one") else "?"
        return interrupted_text(
            {trigger: either(options) for trigger, options in rests.items()}, self._writer, most=most
        )

    def _separated(self, format_: Mapping[str, Any], path: str, depth: int) -> str:
        tags = self._field(format_, "tags", list, path)
        one = either(self._tag(tag, f"{path}.tags[{at}]", depth) for at, tag in enumerate(tags))
        more = (
            "" if format_.get("stop_after_first") else f"({self._writer.text(format_.get('separator') or '')} {one})*"
        )
        return f"{one} {more}" if format_.get("at_least_one") else f"({one} {more})?"

    def _check_fields(self, format_: Mapping[str, Any], kind: str, path: str) -> None:
        for name, value in format_.items():
            if value is not None and name != "type" and name not in _FIELDS.get(kind, (name,)):
                raise refused(f"{path}.{shown_field(name)}", " is not supported. Leave it out.")

    def _field(self, format_: Any, name: str, kind: type, path: str) -> Any:
        value = format_.get(name) if isinstance(format_, Mapping) else None
        if not isinstance(value, kind):
            raise refused(f"{path}.{name}", " is required.")
        return value
