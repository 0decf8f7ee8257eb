"""What a client wants a reply to look like → a grammar."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.guide import Choice, Grammar, Guide, JsonSchema, Regex, StructuralFormat, StructuralTag, TagStructure
from .json_schema import checked_schema
from .lark import LarkWriter, either, in_slashes, interrupted_text, literal, optional
from .schema_costs import check_grammar
from .structural import StructuralWriter

_INNER = "inner"  # the grammar that a client wrote


@dataclass(frozen=True, slots=True)
class Header:
    """What a family writes before an answer: `lead`, where a thought came before, then `answer`."""

    lead: str = ""
    answer: str = ""


NO_HEADER = Header()


def guide_grammar(guide: Guide, writer: LarkWriter, header: Header = NO_HEADER, *, calls: str = "") -> str:
    """`calls`: an expression of what the reply may be instead. Raises InvalidParameter for a schema that cannot be."""
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
            return writer.terminal(either(map(literal, options)))  # of one lexeme: as many literals are too many items
        case Grammar():
            return f"@{_INNER}"
        case StructuralTag(structures, triggers):
            return _structures(structures, triggers, guide.param, writer)
        case StructuralFormat(format_):
            return StructuralWriter(writer).expression(format_, f"{guide.param}.format")


def grammars(start: str, **others: str) -> str:
    """llguidance's form for a grammar and those it refers to by `@name`."""
    named = [{"name": name, "lark_grammar": text} for name, text in others.items()]
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]}, ensure_ascii=False)


def _structures(structures: Sequence[TagStructure], triggers: Sequence[str], param: str, writer: LarkWriter) -> str:
    """A structure belongs to the longest trigger that begins it."""
    rests: dict[str, list[str]] = {}
    for number, structure in enumerate(structures):
        trigger = max(filter(structure.begin.startswith, triggers), key=len)
        schema = writer.json(checked_schema(structure.schema, f"{param}.structures[{number}].schema", writer.budget))
        rest = writer.text(structure.begin[len(trigger) :])
        rests.setdefault(trigger, []).append(f"{rest} {schema} {writer.text(structure.end)}".strip())
    return interrupted_text({trigger: either(options) for trigger, options in rests.items()}, writer)
