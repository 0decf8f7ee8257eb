"""Tools: the prompt lists some at its start; others appear as text where the conversation names them."""

import json
from collections.abc import Iterable

from ...core.errors import InvalidParameter
from ...core.messages import ToolChoice, ToolSpec
from ..parameters import named_choice, required_name
from .schema import MessagesTool, MessagesToolChoice, ToolChange

# Anthropic runs these tools on its own servers; this server cannot.
_RUN_BY_ANTHROPIC = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")


MAX_INTRODUCED_CHARS = 16 * 1024 * 1024  # a short block may name a long definition, again and again


class Toolbox:
    """The tools of a request, in its order: the prompt lists the `listed` ones at its start."""

    def __init__(self, tools: Iterable[MessagesTool]) -> None:
        self.listed: list[ToolSpec] = []
        self.deferred: list[ToolSpec] = []
        for number, tool in enumerate(tools):
            if (tool.type or "custom").startswith(_RUN_BY_ANTHROPIC):
                continue
            spec = _spec(tool, f"tools[{number}]")
            (self.deferred if tool.defer_loading else self.listed).append(spec)
        self._texts: dict[str, str] = {}  # definitions that the conversation introduced, by name
        self._num_introduced = 0  # characters
        self._by_name = {spec.name: spec for spec in (*self.listed, *self.deferred)}

    def introduce(self, name: str) -> str:
        """The text that introduces a tool into the conversation: its definition, as templates list tools."""
        spec = self._by_name.get(name)
        if spec is None:
            return f"The tool {name} is not available."
        if name not in self._texts:
            self._texts[name] = json.dumps(spec.to_openai(), ensure_ascii=False)
        self._num_introduced += len(self._texts[name])
        if self._num_introduced > MAX_INTRODUCED_CHARS:
            raise InvalidParameter(
                f"The definitions of the tools that the messages introduce have more than {MAX_INTRODUCED_CHARS} "
                "characters together, which is the maximum. Introduce each tool once.",
                param="messages",
            )
        return self._texts[name]

    def add(self, change: ToolChange, path: str) -> str:
        if change.definition is not None:
            spec = _spec(change.definition, f"{path}.definition")
            self._by_name.setdefault(spec.name, spec)
            return self.introduce(spec.name)
        return self.introduce(_name(change, path))

    def remove(self, change: ToolChange, path: str) -> str:
        return f"The tool {_name(change, path)} is no longer available."


def decode_tool_choice(choice: MessagesToolChoice | None, tools: Toolbox) -> tuple[ToolChoice, int | None]:
    """The choice, and the maximum number of calls in one reply; None: any number."""
    if choice is None:
        return ToolChoice("auto"), None
    most = 1 if choice.disable_parallel_tool_use else None
    match choice.type:
        case "any":
            if not (tools.listed or tools.deferred):
                raise InvalidParameter("`tool_choice` 'any' needs `tools`.", param="tool_choice")
            return ToolChoice("required"), most
        case "tool":
            offered = (*tools.listed, *tools.deferred)
            return named_choice(choice.name, offered, param="tool_choice.name"), most
        case mode:
            return ToolChoice(mode), most


def _spec(tool: MessagesTool, path: str) -> ToolSpec:
    name = required_name(tool.name, path)
    if tool.input_schema is None and (tool.type or "custom") == "custom":
        raise InvalidParameter(f"`{path}.input_schema` is required.", param=f"{path}.input_schema")
    return ToolSpec(
        name=name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=bool(tool.strict),
        param=f"{path}.input_schema",
    )


def _name(change: ToolChange, path: str) -> str:
    name = change.name or change.tool_name
    if not name:
        raise InvalidParameter(f"`{path}` must name a tool.", param=path)
    return name
