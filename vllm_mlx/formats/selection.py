"""Finds the formats of a checkpoint and the ones that the user named, and makes the parser of a reply."""

import re
import secrets
import string
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from . import families
from .bodies import Schemas
from .call import new_call_id
from .call_formats import GENERIC
from .family import ReasoningOpening
from .output_parser import OutputParser

# These names mean the rules that a checkpoint carries. Without such rules, they mean the detected format.
CHECKPOINT_NAMES = ("hf", "beam", "response_template")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"\{[{%][^}]*\btools\b")


@dataclass(frozen=True, slots=True)
class ReplyFormats:
    """The formats in which a model's replies are read, or their names. A part without a format does not occur."""

    reasoning: families.ReasoningChoice | None = None
    calls: families.CallChoice | None = None
    takes_undeclared: bool = False  # calls to undeclared tools are read as calls


def detect_formats(chat_template: str | None, vocabulary: Container[str]) -> tuple[str | None, str | None]:
    """Return the names of the reasoning format and of the tool format, each None if the checkpoint has no such format.

    A template that lists tools in an unknown way gets the generic tool format.
    """
    template = _COMMENT.sub("", chat_template or "")
    rows = families.FAMILIES
    reasoning = next((row.reasoning_choices[0] for row in rows if row.reasons_in(template)), None)
    if reasoning is None:
        reasoning = _by_tokens(vocabulary, [(row.reasoning_choices[0], row.reasoning_tokens) for row in rows])
    calls = next((row.call_choices[0] for row in rows if row.calls_in(template)), None)
    if calls is None and _TOOLS_VARIABLE.search(template):
        # The tags of calls in a vocabulary alone mean little: many tokenizers hold some that their model never learnt.
        calls = _by_tokens(vocabulary, [(row.call_choices[0], row.call_tokens) for row in rows]) or "generic"
    return reasoning, calls


def make_parser(
    reasoning: families.ReasoningChoice | None,
    tools: families.CallChoice | None,
    *,
    schemas: Schemas | None = None,
    starts_in_reasoning: bool = False,
    opening: ReasoningOpening = ReasoningOpening.ANYWHERE,
    marker_tokens: frozenset[str] = frozenset(),
    call_ids: Callable[[], str] | None = None,
    takes_undeclared: bool = False,
) -> OutputParser:
    """Make the parser of one reply. `reasoning`, `tools`: formats or their names, for the parts that the reply has.

    `schemas`: the schemas of the declared tools. Without them, calls to all names are calls; if they are empty, every
    call is text.
    `marker_tokens`: texts that are single tokens of the tokenizer. A marker among them counts only as a special piece.
    `call_ids` makes ids for calls without one; by default, they have the form that the format's templates accept.
    `takes_undeclared`: a call in the format of `tools` is a call to any tool.
    """
    reasoning_format = None if reasoning is None else families.reasoning_format(reasoning)
    tool_format = None if tools is None else families.call_format(tools).reads
    if tool_format is not None and schemas is not None and not schemas:
        tool_format = families.with_tags_only(tool_format)
    formats = () if tool_format is None else (tool_format,)
    if tool_format is not None and not tool_format.is_fallback and schemas:
        formats = (*formats, GENERIC)
    if tool_format is not None and reasoning_format is None:
        reasoning_format = tool_format.reasoning
    return OutputParser(
        reasoning_format,
        formats,
        schemas=schemas,
        tokens=marker_tokens,
        starts_in_reasoning=starts_in_reasoning,
        opening=opening,
        call_ids=call_ids or _new_ids(tool_format.id_length if tool_format is not None else None),
        takes_undeclared=takes_undeclared,
    )


def _new_ids(length: int | None) -> Callable[[], str]:
    if length is None:
        return new_call_id
    return lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def _by_tokens(vocabulary: Container[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str | None:
    """Return the name of the last row that matches: without a template, the plainest format is the likeliest."""
    found = (name for name, tokens in reversed(rows) if tokens and all(token in vocabulary for token in tokens))
    return next(found, None)
