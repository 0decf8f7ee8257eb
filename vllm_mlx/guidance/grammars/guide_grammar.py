"""Writes the grammar of a reply in the form that the client asked for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.request import Choice, Grammar, Guide, JsonSchema, Regex, StructuralFormat, StructuralTag, TagStructure
from .json_schema import checked_schema
from .lark import LarkWriter, either, in_slashes, interrupted_text, literal, optional
from .schema_costs import check_grammar
from .structural import StructuralWriter

_INNER = "inner"  # the name of the grammar that a client wrote


@dataclass(frozen=True, slots=True)
class Header:
    """The text that a family writes before an answer: `lead` if reasoning precedes it, then `answer`."""

    lead: str = ""
    answer: str = ""


NO_HEADER = Header()


def guide_grammar(guide: Guide, writer: LarkWriter, header: Header = NO_HEADER, *, calls: str = "") -> str:
    """Write the grammar. `calls`: an expression of calls that the reply may make instead.

    Raises InvalidParameter for a form that cannot be enforced.
    """
    if isinstance(guide.form, Grammar):
        check_grammar(guide.form.text, guide.param, writer.budget)
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
            return writer.terminal(
                either(map(literal, options))
            )  # one lexeme: as many separate literals exceed the limit of parser items
        case Grammar():
            return f"@{_INNER}"
        case StructuralTag(structures, triggers):
            return _structures(structures, triggers, guide.param, writer)
        case StructuralFormat(format_):
            return StructuralWriter(writer).expression(format_, f"{guide.param}.format")


def grammars(start: str, **others: str) -> str:
    """Return llguidance's JSON for a grammar and the grammars that it refers to by `@name`."""
    named = [{"name": name, "lark_grammar": text} for name, text in others.items()]
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]}, ensure_ascii=False)


def _structures(structures: Sequence[TagStructure], triggers: Sequence[str], param: str, writer: LarkWriter) -> str:
    """Write free text with structures. A structure belongs to the longest trigger that it begins with."""
    rests: dict[str, list[str]] = {}
    for number, structure in enumerate(structures):
        trigger = max(filter(structure.begin.startswith, triggers), key=len)
        schema = writer.json(checked_schema(structure.schema, f"{param}.structures[{number}].schema", writer.budget))
        rest = writer.text(structure.begin[len(trigger) :])
        rests.setdefault(trigger, []).append(f"{rest} {schema} {writer.text(structure.end)}".strip())
    return interrupted_text({trigger: either(options) for trigger, options in rests.items()}, writer)
