"""How model families write reasoning and tool calls: text in, events out."""

from .bodies.tool_schema import Schemas, read_schemas
from .detect import detect_formats, resolve_formats
from .families import call_tags, reasoning_markers, reasoning_tags
from .family import ReasoningTags
from .output_parser import OutputParser, make_parser
from .schema_budget import SchemaBudget

__all__ = [
    "OutputParser",
    "ReasoningTags",
    "SchemaBudget",
    "Schemas",
    "call_tags",
    "detect_formats",
    "make_parser",
    "read_schemas",
    "reasoning_markers",
    "reasoning_tags",
    "resolve_formats",
]
