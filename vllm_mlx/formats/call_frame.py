"""The text of a call around its arguments, and of an argument around its value, as grammars write it."""

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
            line = _break(kind, "head")
            if not tags.has_attributes:
                head_end = tags.head_end if tags.function else ""
                return CallFrame(tags.function, name, head_end + line, tags.end_function)
            before = f'{tags.function} {kind.name_key}="'
            return CallFrame(before, html.escape(name), f'"{tags.head_end}{line}', tags.end_function)
        case NestedXmlCall(prefix=prefix):
            return CallFrame(f'{prefix}<invoke name="', name, '">', f"{prefix}</invoke>")
        case ExpressionCall():
            return CallFrame("", name, kind.opener, kind.closer)


@dataclass(frozen=True, slots=True)
class ArgumentFrame:
    """`before`, the argument's name as plain text, `behind`, the value, `end`."""

    before: str
    key: str
    behind: str
    end: str


def argument_frame(kind: CallKind, key: str, *, is_text: bool = False) -> ArgumentFrame:
    """Return what surrounds the value of the argument `key`. `is_text`: the value is text rather than JSON."""
    match kind:
        case XmlCall(tags=tags):
            type_ = _type(kind, is_text)
            end = _break(kind, "value") + tags.end_parameter + _break(kind, "parameter")
            if tags.has_attributes:
                attribute = "key" if kind.name_key == "tool" else "name"
                behind = f'" {kind.kind}="{type_}"' if type_ else '"'
                return ArgumentFrame(f'{tags.parameter} {attribute}="', html.escape(key), behind + tags.head_end, end)
            behind = f"{tags.head_end}{_break(kind, 'key')}"
            behind += f"{tags.type}{type_}{tags.end_type}" if type_ else ""
            return ArgumentFrame(tags.parameter, key, f"{behind}{tags.value}{_break(kind, 'value')}", end)
        case NestedXmlCall(prefix=prefix):
            return ArgumentFrame(f"{prefix}<", key, ">", f"{prefix}</{key}>")
        case ExpressionCall(dialect=dialect):
            return ArgumentFrame("", key, dialect.assign, "")
        case JsonCall() | NamedCall():
            return ArgumentFrame("{", _quoted(key), ": ", "}")


def _break(kind: XmlCall, place: str) -> str:
    return "\n" if place in kind.breaks else ""


def _type(kind: XmlCall, is_text: bool) -> str:
    """Return the type that a tag names; "" if the family's tags name none."""
    match kind.kind:
        case "":
            return ""
        case "string":
            return "true" if is_text else "false"
    return "string" if is_text else "object"


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
