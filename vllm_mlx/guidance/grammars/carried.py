"""Decides which names a format of calls can carry: its parser must read back the text of its grammar."""

import json
import re
from collections.abc import Iterable, Iterator

from ...core.errors import InvalidParameter, shown
from ...core.events import ContentEvent, ToolCallDelta, ToolCallStart
from ...core.messages import ToolSpec
from ...formats import CallChoice, Schemas
from ...formats.bodies.tool_schema import ANY_ARGUMENTS
from ...formats.families import spelling
from ...formats.family import argument_frame, call_frame
from ...formats.pipeline import OutputParser
from .lark import AddedTokens

_USUAL = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  # every format carries such a name
_TOOL = "f"


class CarriedNames:
    """The names of the tools that one request declares, in the format `choice` of one tokenizer."""

    def __init__(self, names: Iterable[str], choice: CallChoice, tokens: AddedTokens):
        self._schemas: Schemas = dict.fromkeys(names, ANY_ARGUMENTS)
        self._trial = _Trial(choice, tokens)

    def __contains__(self, name: str) -> bool:
        """Return whether a call to the tool `name`, written in the format, is read as a call to it."""
        if _USUAL.fullmatch(name) is not None:
            return True
        events = self._trial.read(name, self._schemas)
        return [event.name for event in events if isinstance(event, ToolCallStart)] == [name]

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

    def __init__(self, choice: CallChoice, tokens: AddedTokens):
        self._trial = _Trial(choice, tokens)

    def __contains__(self, key: object) -> bool:
        """Return whether an argument `key`, written in the format, is read as that argument."""
        return isinstance(key, str) and (_USUAL.fullmatch(key) is not None or self._is_read_back(key))

    def _is_read_back(self, key: str) -> bool:
        events = self._trial.read(_TOOL, {_TOOL: ANY_ARGUMENTS}, key)
        try:
            arguments = json.loads("".join(event.arguments for event in events if isinstance(event, ToolCallDelta)))
        except ValueError:
            return False
        return list(arguments) == [key]


class _Trial:
    """Writes a call and reads it with the parser of a reply."""

    def __init__(self, choice: CallChoice, tokens: AddedTokens):
        self._choice = choice
        self._tokens = tokens

    def read(self, name: str, schemas: Schemas, key: str | None = None) -> list[ContentEvent]:
        """Read a call to the tool `name` with the one argument `key`, or without arguments if `key` is None."""
        parser = OutputParser(None, self._choice, schemas=schemas, marker_tokens=self._tokens.texts)
        events: list[ContentEvent] = []
        for text, is_token in self._pieces(name, key):
            events += parser.feed(text, is_token)
        return [*events, *parser.finish(is_end=True)]

    def _pieces(self, name: str, key: str | None) -> Iterator[tuple[str, bool]]:
        """List the texts of the call, and whether each is a token. Names that the client chose are plain text."""
        written = spelling(self._choice, self._tokens.texts)
        call = call_frame(written.kind, name)
        yield from self._split(written.begin + written.open + call.before)
        yield call.name, False
        yield from self._split((":0" if call.is_numbered else "") + call.behind)
        if key is None:
            yield from self._split(call.no_arguments)
        else:
            argument = argument_frame(written.kind, key)
            yield from self._split(argument.before)
            yield argument.name, False
            yield from self._split(argument.behind + "1" + argument.end)
        yield from self._split(call.end + written.close + written.end)

    def _split(self, text: str) -> Iterator[tuple[str, bool]]:
        return ((part, part in self._tokens.ids) for part in self._tokens.parts(text))
