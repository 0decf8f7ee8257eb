"""How model families write thoughts and tool calls, by the names that users choose them with."""

from collections.abc import Callable
from dataclasses import dataclass

from .bodies import JsonOrXmlBody, Schemas, ToolBody


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    open: str
    close: str
    is_implied: bool = False  # the reply is a thought until `close`, whether or not `open` was written


@dataclass(frozen=True, slots=True)
class ToolFormat:
    open: str
    close: str
    new_body: Callable[[Schemas, tuple[str, ...]], ToolBody]  # of (schemas, enclosing tags that are text)
    bare_open: str | None = None  # begins a body whose opening tag was left out


_THINK = ReasoningFormat("<think>", "</think>")
_TOOL_CALL = ToolFormat("<tool_call>", "</tool_call>", JsonOrXmlBody, bare_open="<function=")

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": _THINK,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True),
}
TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _TOOL_CALL,
    "qwen3_json": _TOOL_CALL,
    "qwen3_xml": _TOOL_CALL,
    "qwen3_coder": _TOOL_CALL,
}
