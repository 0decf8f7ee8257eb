"""Reasoning and tool calls as model families write them: text in, events out."""

from .bodies.tool_schema import SchemaBudget, Schemas, read_schemas
from .families import CallChoice, ReasoningChoice, call_format, call_tags, reasoning_format
from .family import Calls, Family, ReasoningFormat, ReasoningOpening, ReasoningTags
from .output_parser import OutputParser
from .selection import ReplyFormats, detect_formats, make_parser

__all__ = [
    "CallChoice",
    "Calls",
    "Family",
    "OutputParser",
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
    "make_parser",
    "read_schemas",
    "reasoning_format",
]
