"""Which formats a checkpoint speaks, from its chat template and its vocabulary."""

import re
from collections.abc import Container, Mapping, Sequence

from ..core.errors import ConfigError
from .generic import TOOL_FORMATS
from .reasoning_formats import REASONING_FORMATS
from .signatures import REASONING_SIGNATURES, REASONING_TOKENS, TOOL_SIGNATURES, TOOL_TOKENS, Signature

# Names under which other servers read the rules that a checkpoint carries: here those are what is found in it.
OF_THE_CHECKPOINT = ("hf", "beam", "response_template")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"\{[{%][^}]*\btools\b")


def detect_formats(chat_template: str | None, vocabulary: Container[str]) -> tuple[str | None, str | None]:
    """Return the names of the reasoning format and of the tool format, None where there is none.

    A template that shows tools to the model, in no way that is known, gets the generic tool format.
    """
    template = _COMMENT.sub("", chat_template or "")
    reasoning = _named(REASONING_SIGNATURES, template) or _spelled(REASONING_TOKENS, vocabulary)
    tools = _named(TOOL_SIGNATURES, template)
    if tools is None and _TOOLS_VARIABLE.search(template):
        tools = _spelled(TOOL_TOKENS, vocabulary) or "generic"
    return reasoning, tools


def resolve_formats(
    reasoning: str, tools: str, *, chat_template: str | None, vocabulary: Container[str]
) -> tuple[str | None, str | None]:
    """The same, with the user's choice: a name, "none", or "auto". Raises ConfigError for an unknown name."""
    detected_reasoning, detected_tools = detect_formats(chat_template, vocabulary)
    return (
        _choose("--reasoning-parser", reasoning, detected_reasoning, REASONING_FORMATS),
        _choose("--tool-call-parser", tools, detected_tools, TOOL_FORMATS),
    )


def _named(signatures: Sequence[Signature], template: str) -> str | None:
    return next((signature.name for signature in signatures if signature.matches(template)), None)


def _spelled(spellings: Sequence[tuple[str, tuple[str, ...]]], vocabulary: Container[str]) -> str | None:
    return next((name for name, tokens in spellings if all(token in vocabulary for token in tokens)), None)


def _choose(flag: str, choice: str, detected: str | None, known: Mapping[str, object]) -> str | None:
    if choice == "auto" or choice in OF_THE_CHECKPOINT:
        return detected
    if choice == "none":
        return None
    if choice not in known:
        raise ConfigError(f"{flag} {choice} is not known. Choose auto, none or one of: {', '.join(sorted(known))}.")
    return choice
