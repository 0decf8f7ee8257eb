"""Writes calls as text, as their family writes them: the other direction of the parsers. Knows no template."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.messages import ToolCallPart
from .bodies.literal_scanner import Dialect
from .family import CallKind, ExpressionCall, JsonCall, NamedCall, Spelling, argument_frame, call_frame

_WORDS = {True: "True", False: "False", None: "None"}


def written_calls(written: Spelling, calls: Sequence[ToolCallPart]) -> str:
    """Return the text of a reply's calls. A number at the end of a call's id is the call's number."""
    texts = ("".join(part for part, _ in call_parts(written, call, index)) for index, call in enumerate(calls))
    return f"{written.begin}{written.between.join(texts)}{written.end}"


def call_parts(written: Spelling, call: ToolCallPart, index: int = 0) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a call's text, and whether each is a name of the client: such a name contains no tag."""
    frame = call_frame(written.kind, call.name)
    number = call.call_id.rpartition(":")[2]
    head = f":{number if number.isdecimal() else index}" if frame.is_numbered else ""
    yield written.open + frame.before, False
    yield frame.name, True
    yield head + frame.behind, False
    yield from _arguments(written.kind, call.arguments)
    yield frame.end + written.close, False


def _arguments(kind: CallKind, arguments: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    if isinstance(kind, JsonCall | NamedCall):
        yield _json(arguments), False
        return
    separator = ""
    for key, value in arguments.items():
        frame = argument_frame(kind, key, is_text=isinstance(value, str))
        if isinstance(kind, ExpressionCall):
            text = _literal(value, kind.dialect)
        else:
            text = value if isinstance(value, str) else _json(value)
        yield separator + frame.before, False
        yield frame.name, True
        yield frame.behind + text + frame.end, False
        separator = kind.separator if isinstance(kind, ExpressionCall) else ""


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
