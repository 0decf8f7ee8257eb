"""Flat tool definitions → core tools. The tools of a namespace get one name each, which replies take apart again."""

from collections.abc import Iterable, Mapping, Sequence

from ...core.errors import InvalidParameter, Unsupported
from ...core.messages import ToolChoice, ToolSpec
from ..text import well_formed, well_formed_json
from .schema import WireTool, WireToolChoice

SEPARATOR = "__"

Namespaces = Mapping[str, tuple[str, str]]  # the name that the model sees -> (namespace, name inside it)


def flat_name(namespace: str | None, name: str) -> str:
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def decode_tools(tools: Sequence[WireTool]) -> tuple[tuple[ToolSpec, ...], Namespaces]:
    """Only functions reach the prompt: every other type is run by a server that this one is not."""
    specs: list[ToolSpec] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        if tool.type == "function":
            specs.append(_spec(tool, None, path))
        elif tool.type == "namespace":
            for inner, spec in _members(tool, path):
                specs.append(spec)
                namespaces[spec.name] = (tool.name or "", inner)
    return tuple(specs), namespaces


def decode_tool_choice(choice: str | WireToolChoice | None) -> ToolChoice:
    match choice:
        case None | "auto":
            return ToolChoice("auto")
        case "none":
            return ToolChoice("none")
        case "required" | WireToolChoice():
            raise Unsupported(
                "A `tool_choice` that forces a call needs guided decoding, which is not supported yet. Use 'auto' or "
                "'none'.",
                param="tool_choice",
            )
        case other:
            raise InvalidParameter(
                f"Invalid value for `tool_choice`: {other}! Only 'auto', 'none', 'required' or a tool are supported.",
                param="tool_choice",
            )


def _members(namespace: WireTool, path: str) -> Iterable[tuple[str, ToolSpec]]:
    if not namespace.name:
        raise InvalidParameter(f"`{path}.name` is required.", param=f"{path}.name")
    for number, tool in enumerate(namespace.tools or ()):
        if tool.type == "function":
            spec = _spec(tool, namespace.name, f"{path}.tools[{number}]")
            yield tool.name or "", spec


def _spec(tool: WireTool, namespace: str | None, path: str) -> ToolSpec:
    if not tool.name:
        raise InvalidParameter(f"`{path}.name` is required.", param=f"{path}.name")
    return ToolSpec(
        name=well_formed(flat_name(namespace, tool.name)),
        description=None if tool.description is None else well_formed(tool.description),
        parameters=well_formed_json(tool.parameters),
        strict=bool(tool.strict),
    )
