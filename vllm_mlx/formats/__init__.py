"""Reasoning and tool calls as model families write them: text in, events out."""

from .bodies.tool_schema import SchemaBudget, Schemas, read_schemas
from .families import CallChoice, ReasoningChoice, call_format, call_tags, reasoning_format
from .family import Calls, Family, ReasoningFormat, ReasoningOpening, ReasoningTags
from .selection import ReplyFormats, detect_formats

__all__ = [
    "CallChoice",
    "Calls",
    "Family",
    "ReasoningChoice",
    "ReasoningFormat",
    "ReasoningOpening",
    "ReasoningTags",
    "ReplyFormats",
    "SchemaBudget",
    "Schemas",
    "call_format",
    "call_tags",
    "detect_formats",
    "read_schemas",
    "reasoning_format",
]
