"""Writes calls as text, as their family writes them: the other direction of the parsers. Knows no template."""

import json
from collections.abc import Sequence
from typing import Any

from ..core.messages import ToolCallPart
from .bodies.literal_scanner import Dialect
from .family import CallKind, ExpressionCall, JsonCall, NamedCall, Spelling, argument_frame, call_frame

_WORDS = {True: "True", False: "False", None: "None"}


def written_calls(written: Spelling, calls: Sequence[ToolCallPart]) -> str:
    """Return the text of a reply's calls. A number at the end of a call's id is the call's number."""
    texts = (f"{written.open}{_call(written.kind, call, index)}{written.close}" for index, call in enumerate(calls))
    return f"{written.begin}{written.between.join(texts)}{written.end}"


def _call(kind: CallKind, call: ToolCallPart, index: int) -> str:
    frame = call_frame(kind, call.name)
    number = call.call_id.rpartition(":")[2]
    head = f":{number if number.isdecimal() else index}" if frame.is_numbered else ""
    return f"{frame.before}{frame.name}{head}{frame.behind}{_arguments(kind, call.arguments)}{frame.end}"


def _arguments(kind: CallKind, arguments: dict[str, Any]) -> str:
    if isinstance(kind, JsonCall | NamedCall):
        return _json(arguments)
    texts = []
    for key, value in arguments.items():
        frame = argument_frame(kind, key, is_text=isinstance(value, str))
        if isinstance(kind, ExpressionCall):
            text = _literal(value, kind.dialect)
        else:
            text = value if isinstance(value, str) else _json(value)
        texts.append(f"{frame.before}{frame.name}{frame.behind}{text}{frame.end}")
    return (kind.separator if isinstance(kind, ExpressionCall) else "").join(texts)


def _literal(value: Any, dialect: Dialect) -> str:
    match value:
        case dict():
            keys = (key if dialect.has_words else _json(key) for key in value)
            items = (f"{key}:{_literal(item, dialect)}" for key, item in zip(keys, value.values(), strict=True))
            return f"{{{','.join(items)}}}"
        case list():
            return f"[{','.join(_literal(item, dialect) for item in value)}]"
        case str() if not dialect.has_escapes:
            return f"{dialect.quotes[0]}{value}{dialect.quotes[0]}"
        case bool() | None if not dialect.has_words:
            return _WORDS[value]
        case _:
            return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
