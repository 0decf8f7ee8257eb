"""The parser of one reply: text in; content, reasoning and tool calls out."""

import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ..core.errors import ConfigError
from ..core.events import ContentEvent, TextDelta
from .bodies.tool_schema import Schemas, read_schemas
from .call_formats import GENERIC
from .detect import CHECKPOINT_NAMES
from .families import calls_by_name, reasoning_by_name
from .schema_budget import SchemaBudget
from .tagged_parser import TaggedParser, new_call_id


class OutputParser(Protocol):
    """Call `feed` for every piece, then `finish` once. The events never depend on where the text was cut.

    `special`: the piece is the complete text of one added token of the tokenizer. `is_end`: the model ended its turn,
    so an open call is closed and its arguments become one JSON object. Otherwise a limit cut the reply, and the call
    stays open.
    """

    text_starts: list[int]
    """For each TextDelta of the last `feed` or `finish`: where its text begins, in characters fed since the start."""

    @property
    def markers(self) -> frozenset[str]:
        """The tags that this parser may consume."""

    @property
    def in_reasoning(self) -> bool: ...

    def feed(self, text: str, special: bool = False) -> list[ContentEvent]: ...

    def finish(self, *, is_end: bool = False) -> list[ContentEvent]: ...


class PlainParser:
    """The parser of a model without formats: all text is content."""

    markers: frozenset[str] = frozenset()
    in_reasoning = False

    def __init__(self) -> None:
        self.text_starts: list[int] = []
        self._position = 0

    def feed(self, text: str, special: bool = False) -> list[ContentEvent]:
        self.text_starts = [self._position] if text else []
        self._position += len(text)
        return [TextDelta(text)] if text else []

    def finish(self, *, is_end: bool = False) -> list[ContentEvent]:
        self.text_starts = []
        return []


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
    """Make the parser of one reply. Raises ConfigError for an unknown name.

    `reasoning`, `tools`: names of formats, as the flags take them; None: the reply has none.
    `tool_specs`: the declared tools as OpenAI dicts; without any, calls to all names are calls.
    `schemas`: the schemas of the declared tools, if they were read already.
    `marker_tokens`: texts that are single tokens of the tokenizer. A marker among them counts only as a special piece.
    None: markers count as text, until one of their format arrives as a special piece.
    `call_ids`: makes ids for calls to which the model gave none; None: ids that the format's templates accept.
    """
    reasoning = "qwen3" if reasoning in CHECKPOINT_NAMES else reasoning  # the checkpoint is not known here
    tools = "generic" if tools in CHECKPOINT_NAMES else tools
    reasoning_formats, calls = reasoning_by_name(), calls_by_name()
    for name, known in ((reasoning, sorted(reasoning_formats)), (tools, sorted(calls))):
        if name is not None and name not in known:
            raise ConfigError(f"Unknown parser {name}. Known: {', '.join(known)}.")
    if reasoning is None and tools is None:
        return PlainParser()
    schemas = schemas or _schemas(tool_specs) or None
    tool_format = calls[tools].reads if tools is not None else None
    reasoning_format = reasoning_formats[reasoning] if reasoning is not None else None
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


def _new_ids(length: int | None) -> Callable[[], str]:
    if length is None:
        return new_call_id
    return lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def _schemas(tool_specs: Iterable[Mapping[str, Any]]) -> Schemas:
    functions = [spec.get("function", spec) for spec in tool_specs]
    named = [function for function in functions if function.get("name")]
    return read_schemas(((tool["name"], tool.get("parameters"), tool["name"]) for tool in named), SchemaBudget())
