"""Flat tool definitions → core tools. A tool of a namespace gets one name, which replies split again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import InvalidParameter, Unsupported, shown
from ...core.messages import ToolChoice, ToolSpec
from ..parameters import named_choice, required_name
from .schema import ResponsesTool, ResponsesToolChoice

SEPARATOR = "__"
CUSTOM_INPUT = "input"  # the argument that holds a custom tool's text

Namespaces = Mapping[str, tuple[str, str]]  # the name that the model sees -> (namespace, name inside it)


def flat_name(namespace: str | None, name: str) -> str:
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    specs: tuple[ToolSpec, ...] = ()
    namespaces: Namespaces = field(default_factory=dict)
    custom: frozenset[str] = frozenset()  # names of tools that take one text


def decode_tools(tools: Sequence[ResponsesTool]) -> Tools:
    """Tools that the client runs reach the prompt. Other types need a server that runs them, so they are left out."""
    specs: list[ToolSpec] = []
    namespaces: dict[str, tuple[str, str]] = {}
    custom: set[str] = set()
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        if tool.type == "function":
            specs.append(_spec(tool, None, path))
        elif tool.type == "custom":
            specs.append(_custom(tool, path))
            custom.add(specs[-1].name)
        elif tool.type == "namespace":
            for inner, spec in _members(tool, path):
                specs.append(spec)
                namespaces[spec.name] = (tool.name or "", inner)
    return Tools(specs=tuple(specs), namespaces=namespaces, custom=frozenset(custom))


def decode_tool_choice(choice: str | ResponsesToolChoice | None, tools: Sequence[ToolSpec]) -> ToolChoice:
    match choice:
        case None | "auto" | "none":
            return ToolChoice("auto" if choice is None else choice)
        case "required" if not tools:
            raise InvalidParameter("`tool_choice` 'required' needs `tools`.", param="tool_choice")
        case "required":
            return ToolChoice("required")
        case ResponsesToolChoice(type="function" | "custom", name=str(name)):
            return named_choice(name, tools)
        case ResponsesToolChoice(type=kind):
            raise Unsupported(
                f"`tool_choice` of type '{shown(kind)}' is not supported. Name a function, or use 'required'.",
                param="tool_choice",
            )
        case other:
            raise InvalidParameter(
                f"Invalid value for `tool_choice`: {shown(other)}! Only 'auto', 'none', 'required' or a tool are "
                "supported.",
                param="tool_choice",
            )


def _members(namespace: ResponsesTool, path: str) -> Iterable[tuple[str, ToolSpec]]:
    prefix = required_name(namespace.name, path)
    for number, tool in enumerate(namespace.tools or ()):
        if tool.type == "function":
            spec = _spec(tool, prefix, f"{path}.tools[{number}]")
            yield tool.name or "", spec


def _custom(tool: ResponsesTool, path: str) -> ToolSpec:
    """A tool that takes one text is to the model a function with one argument."""
    name = required_name(tool.name, path)
    text: dict[str, Any] = {"type": "string"}
    match tool.format:
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            text["description"] = f"Text that follows this {syntax} grammar:\n{definition}"
    return ToolSpec(
        name=name,
        description=tool.description,
        parameters={"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]},
        param=f"{path}.format",
    )


def _spec(tool: ResponsesTool, namespace: str | None, path: str) -> ToolSpec:
    return ToolSpec(
        name=flat_name(namespace, required_name(tool.name, path)),
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
        param=f"{path}.parameters",
    )
