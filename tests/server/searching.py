"""Scripts of a model that asks for web searches."""

from typing import Any

from vllm_mlx.core.events import (
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_mlx.core.messages import ToolResultPart
from vllm_mlx.core.request import Request

from .fakes import Script, finished, says

TEXT = "[1] A\nhttps://en.example.org/a\nabout a\n\n[2] B\nhttps://news.example.com/b\nabout b"


def calls(*names: str, query: str = "news", before: str = "Let me look. ", first: int = 1) -> Script:
    events: list[Any] = [Started(7, 2), ReasoningDelta("hm"), TextDelta(before)]
    for index, name in enumerate(names):
        call = [
            ToolCallStart(index, f"call_{first + index}", name),
            ToolCallDelta(index, '{"query":'),
            ToolCallDelta(index, f' "{query}"}}'),
        ]
        events += [*call, ToolCallEnd(index)]
    return (*events, finished(FinishReason.TOOL_CALLS, 10))


def results(request: Request) -> list[ToolResultPart]:
    parts = (part for message in request.messages or () for part in message.parts)
    return [part for part in parts if isinstance(part, ToolResultPart)]


def once(request: Request, index: int) -> Script:
    """It searches once, and then answers."""
    return says("It is ", "new.") if results(request) else calls("web_search")


_KEPT_BY_CODEX = {
    "reasoning": ("type", "summary", "encrypted_content"),
    "web_search_call": ("type", "status", "action"),
    "message": ("type", "role", "content"),
    "function_call": ("type", "name", "arguments", "call_id"),
}


def as_codex_sends(item: dict[str, Any]) -> dict[str, Any]:
    """The item with the fields that Codex keeps: those of `ResponseItem` in codex-rs/protocol/src/models.rs."""
    kept = {name: item[name] for name in _KEPT_BY_CODEX[item["type"]] if name in item}
    if "action" in kept:
        kept["action"] = {name: kept["action"][name] for name in ("type", "query")}
    return kept
