"""Chooses the formats of replies: the checkpoint's, or one that a flag names, of this server or of another package.

The code of a package runs only if the operator named its parser.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from ..core.config import EngineConfig
from ..core.errors import ConfigError, setting
from ..formats import Family, ReplyFormats, detect_formats
from ..formats.families import CALL_FORMATS, REASONING_FORMATS
from ..formats.response_template import UnreadableTemplate, read_response_template
from ..formats.selection import CHECKPOINT_NAMES
from ..formats.tokenizer import Tokenizer
from ..guidance.reasoning import CheckpointReasoning

GROUP = "vllm_mlx.parsers"
_PAGE = "docs/parsers.md"
_RULES = "response_template"  # the name of formats that the checkpoint's own rules describe

logger = logging.getLogger(__name__)
F = TypeVar("F")  # a format


@dataclass(frozen=True, slots=True)
class CheckpointFormats:
    """The formats of one checkpoint's replies, and their names in the status; None for a part that replies lack."""

    replies: ReplyFormats
    reasoning_name: str | None
    calls_name: str | None
    judge: CheckpointReasoning | None  # also where the parser shows no reasoning, if a budget may end it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part(Generic[F]):
    """One part of replies: reasoning, or tool calls."""

    setting: str
    formats: Mapping[str, F]  # this server's, by name
    of: Callable[[Family], F | None]
    other: str  # the only part that another parser reads

    def choose(self, name: str, detected: str | None, rules: Family) -> tuple[str | None, F | None]:
        """Return the format that the user's choice `name` means, and its name. `rules`: the checkpoint's own.

        Raises ConfigError for a name that neither this server nor an installed package knows, and for an installed
        parser that does not read this part.
        """
        if name == "none":
            return None, None
        if name == "auto" or name in CHECKPOINT_NAMES:
            own = self.of(rules)
            if own is not None and (name != "auto" or detected in (None, "generic")):  # nothing else shows the format
                return rules.name, own
            return detected, None if detected is None else self.formats[detected]
        if name in self.formats:
            return name, self.formats[name]
        if (installed := _installed(self.setting, name)) is None:
            known = ", ".join(sorted(self.formats))
            raise ConfigError(f"{setting(self.setting)} {name} is not known. Choose auto, none or one of: {known}.")
        if (format := self.of(installed)) is None:
            raise ConfigError(f"{setting(self.setting)} {name}: this parser reads {self.other} only.")
        return name, format


_REASONING = _Part(
    setting="reasoning_parser", formats=REASONING_FORMATS, of=lambda family: family.reasoning, other="tool calls"
)
_CALLS = _Part(setting="tool_call_parser", formats=CALL_FORMATS, of=lambda family: family.calls, other="reasoning")


def check_parsers(config: EngineConfig) -> None:
    """Check the names of parsers without a checkpoint. Raises ConfigError as `reply_formats` does."""
    _REASONING.choose(config.reasoning_parser, None, Family(_RULES))
    _CALLS.choose(config.tool_call_parser, None, Family(_RULES))


def reply_formats(config: EngineConfig, tokenizer: Tokenizer) -> CheckpointFormats:
    """Raise ConfigError for a name that neither this server nor an installed package knows."""
    chosen = config.reasoning_parser, config.tool_call_parser
    detected_reasoning, detected_calls = detect_formats(tokenizer.chat_template, tokenizer)
    rules = _rules(tokenizer, is_asked_for=not {*CHECKPOINT_NAMES}.isdisjoint(chosen))
    reasoning_name, format = _REASONING.choose(chosen[0], detected_reasoning, rules)
    calls_name, calls = _CALLS.choose(chosen[1], detected_calls, rules)
    strings = config.reasoning_config
    judge = None if format is None and strings is None else CheckpointReasoning(tokenizer, format, strings)
    if judge is not None and format is None and chosen[0] != "none":
        reasoning_name = "reasoning_config"
    replies = ReplyFormats(
        None if judge is None or reasoning_name is None else judge.format,
        calls,
        takes_undeclared=config.undeclared_calls == "call",
    )
    return CheckpointFormats(replies, reasoning_name, calls_name, judge)


def _rules(tokenizer: Tokenizer, *, is_asked_for: bool) -> Family:
    """Return the formats that the checkpoint's own rules describe. A format is None if they describe none.

    Raises ConfigError if they cannot be read and the operator asked for them; otherwise the log says so.
    """
    template = tokenizer.response_template
    if template is None:
        return Family(_RULES)
    try:
        rules = read_response_template(template)
    except UnreadableTemplate as error:
        message = f"The checkpoint's `response_template` cannot be read: {error}."
        if is_asked_for:
            choose = f"Choose auto or a format for {setting('reasoning_parser')} and {setting('tool_call_parser')}."
            raise ConfigError(f"{message} {choose}") from error
        logger.info("%s The formats of replies are detected by the chat template and the vocabulary alone.", message)
        return Family(_RULES)
    return Family(_RULES, rules.reasoning, rules.calls)


def _installed(name: str, choice: str) -> Family | None:
    """Return the family of this name that an installed package has, or None.

    Only the metadata of packages is read to find it. Then the package that was named is imported, which runs its code.
    """
    found = {(entry.value, _package(entry)): entry for entry in entry_points(group=GROUP, name=choice)}
    if len(found) > 1:
        packages = ", ".join(sorted(package for _, package in found))
        raise ConfigError(f"{setting(name)} {choice}: several packages have it: {packages}. Uninstall all but one.")
    return next((_loaded(name, entry) for entry in found.values()), None)


def _package(entry: EntryPoint) -> str:
    return "an unnamed package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _loaded(name: str, entry: EntryPoint) -> Family:
    where = f"{setting(name)} {entry.name} ({entry.value}, of {_package(entry)})"
    logger.info("%s runs code of that package", where)
    try:
        family = entry.load()
    except (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, OSError) as error:
        raise ConfigError(f"{where} cannot be loaded: {error!r}.") from error
    if not isinstance(family, Family):
        raise ConfigError(f"{where} is a {type(family).__name__}, not a vllm_mlx.formats.Family: see {_PAGE}.")
    if not all(tag and isinstance(tag, str) for tag in _tags(family)):
        raise ConfigError(f"{where} lacks a tag, or has one that is not a text or is empty: see {_PAGE}.")
    if family.calls is not None and not any(not spelling.needs for spelling in family.calls.writes):
        raise ConfigError(f"{where} does not say how calls are written: see {_PAGE}.")
    return family


def _tags(family: Family) -> Iterator[object]:
    if family.reasoning is not None:
        yield from family.reasoning.tags
        yield from family.reasoning.bounds.starts[:1] or ("",)
        yield from family.reasoning.bounds.ends[:1] or ("",)
    if family.calls is not None:
        yield from family.calls.reads.tags
        yield from family.calls.reads.tags[:1] or ("",)
