"""Finds the formats of a checkpoint."""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

from .families import FAMILIES
from .family import Calls, ReasoningFormat

# These names mean the rules that a checkpoint carries. Without such rules, they mean the detected format.
CHECKPOINT_NAMES = ("hf", "beam", "response_template")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"\{[{%][^}]*\btools\b")


@dataclass(frozen=True, slots=True)
class ReplyFormats:
    """The formats in which a model's replies are read. A part without a format does not occur."""

    reasoning: ReasoningFormat | None = None
    calls: Calls | None = None
    takes_undeclared: bool = False  # calls to undeclared tools are read as calls


def detect_formats(chat_template: str | None, vocabulary: Container[str]) -> tuple[str | None, str | None]:
    """Return the names of the reasoning format and of the tool format, each None if the checkpoint has no such format.

    A template that lists tools in an unknown way gets the generic tool format.
    """
    template = _COMMENT.sub("", chat_template or "")
    reasoning = next((row.reasoning_choices[0] for row in FAMILIES if row.reasons_in(template)), None)
    if reasoning is None:
        reasoning = _by_tokens(vocabulary, [(row.reasoning_choices[0], row.reasoning_tokens) for row in FAMILIES])
    calls = next((row.call_choices[0] for row in FAMILIES if row.calls_in(template)), None)
    if calls is None and _TOOLS_VARIABLE.search(template):
        # The tags of calls in a vocabulary alone mean little: many tokenizers hold some that their model never learnt.
        calls = _by_tokens(vocabulary, [(row.call_choices[0], row.call_tokens) for row in FAMILIES]) or "generic"
    return reasoning, calls


def _by_tokens(vocabulary: Container[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str | None:
    """Return the name of the last row that matches: without a template, the plainest format is the likeliest."""
    found = (name for name, tokens in reversed(rows) if tokens and all(token in vocabulary for token in tokens))
    return next(found, None)
