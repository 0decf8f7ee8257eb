"""Which formats a checkpoint speaks, from its chat template and its vocabulary."""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

from ..core.errors import ConfigError
from .generic import TOOL_FORMATS
from .reasoning_formats import REASONING_FORMATS


@dataclass(frozen=True, slots=True)
class _Signature:
    """A format is spoken where the template has all of `template` and none of `unless`."""

    name: str
    template: tuple[str, ...]
    unless: tuple[str, ...] = ()

    def matches(self, template: str) -> bool:
        return all(part in template for part in self.template) and not any(part in template for part in self.unless)


# The first that matches counts, so the particular ones come first.
_REASONING = (
    _Signature("deepseek_r1", ("<｜Assistant｜>", "</think>"), unless=("thinking",)),
    _Signature("qwen3", ("</think>",)),
    _Signature("qwen3", ("<think>",)),
)
_TOOLS = (
    _Signature("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    _Signature("hermes", ("<tool_call>",), unless=("<arg_key>", "<tool_sep>")),
)
_REASONING_TOKENS = {"qwen3": ("<think>", "</think>")}
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


def detect_formats(chat_template: str | None, vocabulary: Container[str]) -> tuple[str | None, str | None]:
    """Return the names of the reasoning format and of the tool format, None where there is none.

    The vocabulary tells of thoughts only: many tokenizers hold tool tags that their model never learnt to use.
    """
    template = _COMMENT.sub("", chat_template or "")
    reasoning = next((signature.name for signature in _REASONING if signature.matches(template)), None)
    tools = next((signature.name for signature in _TOOLS if signature.matches(template)), None)
    if reasoning is None:
        by_tokens = (name for name, tokens in _REASONING_TOKENS.items() if all(token in vocabulary for token in tokens))
        reasoning = next(by_tokens, None)
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


def _choose(flag: str, choice: str, detected: str | None, known: Mapping[str, object]) -> str | None:
    if choice == "auto":
        return detected
    if choice == "none":
        return None
    if choice not in known:
        raise ConfigError(f"{flag} {choice} is not known. Choose auto, none or one of: {', '.join(sorted(known))}.")
    return choice
