"""Text in, events out: what a model wrote, as content, thoughts and tool calls."""

import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.errors import ConfigError
from .base import OutputParser
from .bodies.tool_schema import Schemas, read_schemas
from .detect import OF_THE_CHECKPOINT, detect_formats, resolve_formats
from .generic import GENERIC, TOOL_FORMATS
from .plain import PlainParser
from .reasoning_formats import REASONING_FORMATS
from .schema_budget import SchemaBudget
from .tagged import TaggedParser, new_call_id
from .thoughts import ThoughtTags, call_tags, thought_tags

__all__ = [
    "OutputParser",
    "SchemaBudget",
    "Schemas",
    "ThoughtTags",
    "call_tags",
    "detect_formats",
    "make_parser",
    "read_schemas",
    "reasoning_markers",
    "resolve_formats",
    "thought_tags",
]


def make_parser(
    reasoning: str | None,
    tools: str | None,
    *,
    tool_specs: Iterable[Mapping[str, Any]] = (),
    schemas: Schemas | None = None,
    starts_in_reasoning: bool = False,
    marker_tokens: frozenset[str] | None = None,
    call_ids: Callable[[], str] | None = None,
) -> OutputParser:
    """A parser of one reply. Raises ConfigError for a name that is not known.

    `tool_specs`: the declared tools as OpenAI dicts; without any, calls to all names are calls.
    `schemas`: those of the declared tools instead, where they were read already.
    `marker_tokens`: the texts that are single tokens of the tokenizer. A marker among them counts only as a special
    piece; None: markers count as text, until one of their format comes as a special piece.
    `call_ids`: makes the ids of calls to which the model gave none; None: as the format's templates take them.
    """
    reasoning = "qwen3" if reasoning in OF_THE_CHECKPOINT else reasoning  # nothing is known of the checkpoint here
    tools = "generic" if tools in OF_THE_CHECKPOINT else tools
    for name, known in ((reasoning, REASONING_FORMATS), (tools, TOOL_FORMATS)):
        if name is not None and name not in known:
            raise ConfigError(f"Unknown parser {name}. Known: {', '.join(sorted(known))}.")
    if reasoning is None and tools is None:
        return PlainParser()
    schemas = schemas or _schemas(tool_specs) or None
    tool_format = TOOL_FORMATS[tools] if tools is not None else None
    reasoning_format = REASONING_FORMATS[reasoning] if reasoning is not None else None
    formats = () if tool_format is None else (tool_format,)
    if tool_format is not None and not tool_format.is_fallback and schemas:
        formats = (*formats, GENERIC)
    if tool_format is not None and reasoning_format is None:
        reasoning_format = tool_format.reasoning
    return TaggedParser(
        reasoning_format,
        formats,
        schemas=schemas,
        token_markers=marker_tokens,
        starts_in_reasoning=starts_in_reasoning,
        call_ids=call_ids or _new_ids(tool_format.id_length if tool_format is not None else None),
    )


def reasoning_markers(reasoning: str) -> tuple[str, str]:
    """The tags that open and close a thought in the format of this name."""
    format = REASONING_FORMATS[reasoning]
    return format.opens[0] if format.opens else format.headers[0].marker, format.closes[0]


def _new_ids(length: int | None) -> Callable[[], str]:
    if length is None:
        return new_call_id
    return lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def _schemas(tool_specs: Iterable[Mapping[str, Any]]) -> Schemas:
    functions = [spec.get("function", spec) for spec in tool_specs]
    named = [function for function in functions if function.get("name")]
    return read_schemas(((each["name"], each.get("parameters"), each["name"]) for each in named), SchemaBudget())
