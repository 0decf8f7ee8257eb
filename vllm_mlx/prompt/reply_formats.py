"""Chooses the formats of replies: the checkpoint's, or one that a flag names, of this server or of another package.

The code of a package runs only if the operator named its parser.
"""

import logging
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from ..core.config import EngineConfig
from ..core.errors import ConfigError, setting
from ..formats import Family, ReplyFormats, resolve_formats
from ..formats.families import call_format, calls_by_name, reasoning_by_name
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


@dataclass(frozen=True, slots=True)
class _Choice:
    """The user's choice for one part of replies, and its meaning without the checkpoint's own rules."""

    setting: str
    name: str
    installed: Family | None  # what an installed package has by that name
    known: str | None  # otherwise the name of a format of this server

    def resolve(self, rules: Family, part: Callable[[Family], F | None]) -> tuple[str | None, str | F | None]:
        """Return the name and the format of this part. `rules`: the checkpoint's own.

        Raises ConfigError for an installed parser that does not read this part.
        """
        if (own := part(rules)) is not None and _asks_rules(self.name, self.known):
            return rules.name, own
        if self.installed is None:
            return self.known, self.known
        if (format := part(self.installed)) is None:
            only = "tool calls" if self.setting == "reasoning_parser" else "reasoning"
            raise ConfigError(f"{setting(self.setting)} {self.name}: this parser reads {only} only.")
        return self.name, format


def check_parsers(config: EngineConfig) -> None:
    """Check the names of parsers without a checkpoint. Raises ConfigError as `reply_formats` does."""
    _choices(config, None, ())


def reply_formats(config: EngineConfig, tokenizer: Tokenizer) -> CheckpointFormats:
    """Raises ConfigError for a name that neither this server nor an installed package knows."""
    reasoning, calls = _choices(config, tokenizer.chat_template, tokenizer)
    rules = _rules(tokenizer, is_asked_for=bool({reasoning.name, calls.name} & {*CHECKPOINT_NAMES}))
    reasoning_name, format = reasoning.resolve(rules, lambda family: family.reasoning)
    calls_name, call_choice = calls.resolve(rules, lambda family: family.calls)
    strings = config.reasoning_config
    judge = None if format is None and strings is None else CheckpointReasoning(tokenizer, format, strings)
    if judge is not None and format is None and reasoning.name != "none":
        reasoning_name = "reasoning_config"
    replies = ReplyFormats(
        None if judge is None or reasoning_name is None else judge.format,
        None if call_choice is None else call_format(call_choice),
        takes_undeclared=config.undeclared_calls == "call",
    )
    return CheckpointFormats(replies, reasoning_name, calls_name, judge)


def _choices(config: EngineConfig, chat_template: str | None, vocabulary: Container[str]) -> tuple[_Choice, _Choice]:
    """Return the choices for reasoning and for tool calls. Raises ConfigError for an unknown name."""
    reasoning = _installed("reasoning_parser", config.reasoning_parser, reasoning_by_name())
    calls = _installed("tool_call_parser", config.tool_call_parser, calls_by_name())
    known_reasoning, known_calls = resolve_formats(
        config.reasoning_parser if reasoning is None else "none",
        config.tool_call_parser if calls is None else "none",
        chat_template=chat_template,
        vocabulary=vocabulary,
    )
    return (
        _Choice("reasoning_parser", config.reasoning_parser, reasoning, known_reasoning),
        _Choice("tool_call_parser", config.tool_call_parser, calls, known_calls),
    )


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


def _asks_rules(choice: str, detected: str | None) -> bool:
    """Whether the checkpoint's rules count: if they were asked for, or if nothing else shows the format."""
    return choice in CHECKPOINT_NAMES or (choice == "auto" and detected in (None, "generic"))


def _installed(name: str, choice: str, known: Container[str]) -> Family | None:
    """Return the family of this name that an installed package has. None if the name means a format of this server.

    Only the metadata of packages is read to find it. Then the package that was named is imported, which runs its code.
    """
    if choice in known or choice in ("auto", "none", *CHECKPOINT_NAMES):
        return None
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
