"""Reasoning and tool calls as model families write them: text in, events out."""

from .bodies.tool_schema import SchemaBudget, Schemas, read_schemas
from .family import Calls, Family, ReasoningFormat, ReasoningOpening, ReasoningTags
from .selection import ReplyFormats, detect_formats

__all__ = [
    "Calls",
    "Family",
    "ReasoningFormat",
    "ReasoningOpening",
    "ReasoningTags",
    "ReplyFormats",
    "SchemaBudget",
    "Schemas",
    "detect_formats",
    "read_schemas",
]
