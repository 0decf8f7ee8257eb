"""Whether a format of calls can carry the name of a tool: its parser must read back what its grammar writes."""

from collections.abc import Iterable

from ..core.errors import InvalidParameter, shown
from ..core.events import ContentEvent, ToolCallStart
from ..core.messages import ToolSpec
from ..formats import CallChoice, Schemas, make_parser
from ..formats.bodies.tool_schema import ANY_ARGUMENTS
from ..formats.call_frame import call_frame
from ..formats.families import spelling
from .grammars import AddedTokens


class CarriedNames:
    """The names of the tools that one request declares, in the format `tools` of one tokenizer."""

    def __init__(self, names: Iterable[str], tools: CallChoice, tokens: AddedTokens):
        self._schemas: Schemas = dict.fromkeys(names, ANY_ARGUMENTS)
        self._tools = tools
        self._tokens = tokens

    def __contains__(self, name: str) -> bool:
        """Whether a call to the tool `name`, written in the format, is read as a call to it."""
        parser = make_parser(None, self._tools, schemas=self._schemas, marker_tokens=self._tokens.texts)
        events: list[ContentEvent] = []
        for text, is_token in self._pieces(name):
            events += parser.feed(text, is_token)
        events += parser.finish(is_end=True)
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

    def _pieces(self, name: str) -> Iterable[tuple[str, bool]]:
        """Write a call without arguments: texts, and whether each is a token. The name is never one."""
        written = spelling(self._tools, self._tokens.texts)
        frame = call_frame(written.kind, name)
        number = ":0" if frame.is_numbered else ""
        yield from self._split(written.begin + written.open + frame.before)
        yield frame.name, False
        yield from self._split(f"{number}{frame.behind}{frame.no_arguments}{frame.end}{written.close}{written.end}")

    def _split(self, text: str) -> Iterable[tuple[str, bool]]:
        return ((part, part in self._tokens.ids) for part in self._tokens.parts(text))
