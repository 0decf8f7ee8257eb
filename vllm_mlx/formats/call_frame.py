"""The text of a call around its arguments, as grammars write it and parsers read it."""

import html
import json
from dataclasses import dataclass

from .family import CallKind, ExpressionCall, JsonCall, NamedCall, NestedXmlCall, XmlCall


@dataclass(frozen=True, slots=True)
class CallFrame:
    """`before`, the name as plain text, `behind`, the arguments, `end`. All parts but `name` may contain tags."""

    before: str
    name: str
    behind: str
    end: str
    no_arguments: str = ""  # how a call without arguments writes them
    is_numbered: bool = False  # a colon and a number follow the name


def call_frame(kind: CallKind, name: str) -> CallFrame:
    """Return what surrounds the arguments of a call to the tool `name`."""
    match kind:
        case JsonCall(name=""):
            return CallFrame("{", _quoted(name), ": ", "}", "{}")
        case JsonCall():
            return CallFrame(f'{{"{kind.name}": ', _quoted(name), f', "{kind.arguments}": ', "}", "{}")
        case NamedCall():
            return CallFrame(kind.before, name, kind.behind, kind.trailer, "{}", kind.is_numbered)
        case XmlCall(tags=tags):
            line = "\n" if "head" in kind.breaks else ""
            if not tags.has_attributes:
                head_end = tags.head_end if tags.function else ""
                return CallFrame(tags.function, name, head_end + line, tags.end_function)
            before = f'{tags.function} {kind.name_key}="'
            return CallFrame(before, html.escape(name), f'"{tags.head_end}{line}', tags.end_function)
        case NestedXmlCall(prefix=prefix):
            return CallFrame(f'{prefix}<invoke name="', name, '">', f"{prefix}</invoke>")
        case ExpressionCall():
            return CallFrame("", name, kind.opener, kind.closer)


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
