"""Decides which names a format of calls can carry: its parser must read back the text of its grammar."""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from ...core.errors import InvalidParameter, shown
from ...core.messages import ToolCallPart, ToolSpec
from ...formats import Calls, Schemas
from ...formats.bodies.tool_schema import ANY_ARGUMENTS
from ...formats.pipeline import OutputParser
from ...formats.reply import ReplyBuilder
from ...formats.tokenizer import AddedTokens
from ...formats.written import call_parts

_USUAL = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  # every format carries such a name
_TOOL = "f"


class CarriedNames:
    """The names of the tools that one request declares, in a format with one tokenizer."""

    def __init__(self, names: Iterable[str], format: Calls, tokens: AddedTokens):
        self._schemas: Schemas = dict.fromkeys(names, ANY_ARGUMENTS)
        self._format = format
        self._tokens = tokens

    def __contains__(self, name: str) -> bool:
        """Return whether a call to the tool `name`, written in the format, is read as a call to it."""
        if _USUAL.fullmatch(name) is not None:
            return True
        read = _read_back(ToolCallPart("", name, {}), self._schemas, self._format, self._tokens)
        return [call.name for call in read] == [name]

    def check(self, tools: Iterable[ToolSpec]) -> None:
        """Raise InvalidParameter, naming the field, if a call to one of the tools cannot be forced."""
        for tool in tools:
            if tool.name not in self:
                raise InvalidParameter(
                    f"No call to the tool {shown(tool.name)!r} can be forced: this model's tool-call format cannot "
                    f"carry its name, `{tool.name_param}`. Rename it, best to letters, digits, `_` and `-` alone, "
                    "or leave it out.",
                    param=tool.name_param,
                )


class CarriedKeys:
    """The names of arguments that a format can carry which writes each argument by itself."""

    def __init__(self, format: Calls, tokens: AddedTokens):
        self._format = format
        self._tokens = tokens

    def __contains__(self, key: object) -> bool:
        """Return whether an argument `key`, written in the format, is read as that argument."""
        if not isinstance(key, str) or _USUAL.fullmatch(key) is not None:
            return isinstance(key, str)
        read = _read_back(ToolCallPart("", _TOOL, {key: 1}), {_TOOL: ANY_ARGUMENTS}, self._format, self._tokens)
        return [[*call.arguments] for call in read] == [[key]]


def _read_back(call: ToolCallPart, schemas: Schemas, format: Calls, tokens: AddedTokens) -> tuple[ToolCallPart, ...]:
    """Write a call, and return the calls that the parser of a reply reads in its text."""
    parser = OutputParser(None, format, schemas=schemas, marker_tokens=tokens.texts)
    reply = ReplyBuilder()
    for text, is_token in _pieces(call, format, tokens):
        reply.feed(parser.feed(text, is_token))
    reply.feed(parser.finish(is_end=True))
    return reply.reply().calls


def _pieces(call: ToolCallPart, format: Calls, tokens: AddedTokens) -> Iterator[tuple[str, bool]]:
    """Yield the texts of the call, and whether each is a token. Names that the client chose are plain text."""
    written = format.spelling(tokens.texts)
    parts = ((written.begin, False), *call_parts(written, call), (written.end, False))
    for is_name, run in groupby(parts, itemgetter(1)):
        text = "".join(part for part, _ in run)
        yield from ((text, False),) if is_name else ((part, part in tokens.ids) for part in tokens.parts(text))
