"""Blocks that other servers or later versions of the protocol wrote into a conversation. They are left out."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from ..search import SEARCH_NAME
from ..wire import ExtraFields, LeftOut

_IN_RESULTS = ("text", "image", "document", "search_result", "tool_reference")
_OF_ASSISTANTS = ("text", "thinking", "redacted_thinking", "tool_use", "server_tool_use", "web_search_tool_result")
_OF_THE_VENDOR = ("_tool_use", "_tool_result", "container_upload", "compaction")  # ends of types
_TEXTS = frozenset({"text", "content", "title", "summary", "output", "stdout", "stderr", "lines", "error_message"})


class OtherBlock(LeftOut):
    """A block of any other form, such as what the vendor's own tools did, or its summary of a conversation."""

    extras: ClassVar[ExtraFields | None] = None
    type: str = Field(examples=["mcp_tool_result"])

    @property
    def texts(self) -> list[str]:
        """Return the texts for the model, in order, without addresses, ids, names, arguments and sealed fields."""
        return list(_texts({"type": self.type, **(self.model_extra or {})}))


def _texts(value: Any) -> Iterator[str]:
    match value:
        case {"type": "text", "data": str(text)}:
            yield text
        case dict():
            for name, member in value.items():
                for inner in member if isinstance(member, list) else [member]:
                    if isinstance(inner, str) and name in _TEXTS:
                        yield from filter(None, [inner])
                    elif name not in ("input", "tools"):
                        yield from _texts(inner)


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def result_tag(value: Any) -> str:
    """Return the branch of a part of a tool's result."""
    kind = _field(value, "type")
    return "other" if isinstance(kind, str) and kind not in _IN_RESULTS else "known"


def assistant_tag(value: Any) -> str:
    """Return the branch of an assistant's block."""
    kind = _field(value, "type")
    is_known = kind in _OF_ASSISTANTS and (kind != "server_tool_use" or _field(value, "name") == SEARCH_NAME)
    return "other" if isinstance(kind, str) and not is_known else "known"


def user_tag(value: Any) -> str:
    """Return the branch of a user's block: another type is refused if it may be misspelt, or hold the question."""
    kind = _field(value, "type")
    return "other" if isinstance(kind, str) and kind.endswith(_OF_THE_VENDOR) else "known"
