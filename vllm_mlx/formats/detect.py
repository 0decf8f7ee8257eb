"""Which formats a checkpoint speaks, from its chat template and its vocabulary."""

import re
from collections.abc import Container, Iterable, Sequence

from ..core.errors import ConfigError, setting
from . import families
from .family import Signature

# By these names other servers read the rules that a checkpoint carries. Here they mean the detected format.
CHECKPOINT_NAMES = ("hf", "beam", "response_template")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"\{[{%][^}]*\btools\b")


def detect_formats(chat_template: str | None, vocabulary: Container[str]) -> tuple[str | None, str | None]:
    """Return the names of the reasoning format and of the tool format, None if there is none.

    A template that lists tools in no known way gets the generic tool format.
    """
    template = _COMMENT.sub("", chat_template or "")
    rows = families.FAMILIES
    reasoning = _by_template(template, ((row.reasoning_choices[0], row.reasoning_signs) for row in rows))
    if reasoning is None:
        reasoning = _by_tokens(vocabulary, [(row.reasoning_choices[0], row.reasoning_tokens) for row in rows])
    calls = _by_template(template, ((row.call_choices[0], row.call_signs) for row in rows))
    if calls is None and _TOOLS_VARIABLE.search(template):
        # The tags of calls in a vocabulary alone mean little: many tokenizers hold some that their model never learnt.
        calls = _by_tokens(vocabulary, [(row.call_choices[0], row.call_tokens) for row in rows]) or "generic"
    return reasoning, calls


def resolve_formats(
    reasoning: str, tools: str, *, chat_template: str | None, vocabulary: Container[str]
) -> tuple[str | None, str | None]:
    """Apply the user's choices: a name, "none", or "auto". Raises ConfigError for an unknown name."""
    detected_reasoning, detected_tools = detect_formats(chat_template, vocabulary)
    return (
        _choose(setting("reasoning_parser"), reasoning, detected_reasoning, families.reasoning_by_name()),
        _choose(setting("tool_call_parser"), tools, detected_tools, families.calls_by_name()),
    )


def _by_template(template: str, rows: Iterable[tuple[str, Iterable[Signature]]]) -> str | None:
    return next(
        (name for name, signatures in rows if any(signature.matches(template) for signature in signatures)), None
    )


def _by_tokens(vocabulary: Container[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str | None:
    """Return the name of the last row that matches: without a template, the plainest format is the likeliest."""
    found = (name for name, tokens in reversed(rows) if tokens and all(token in vocabulary for token in tokens))
    return next(found, None)


def _choose(name: str, choice: str, detected: str | None, known: Iterable[str]) -> str | None:
    if choice == "auto" or choice in CHECKPOINT_NAMES:
        return detected
    if choice == "none":
        return None
    if choice not in known:
        raise ConfigError(f"{name} {choice} is not known. Choose auto, none or one of: {', '.join(sorted(known))}.")
    return choice
