"""Chooses the formats of replies: the checkpoint's, or one that a flag names, of this server or of another package.

Nothing of a package runs unless the operator named its parser.
"""

import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from ..core.config import EngineConfig
from ..core.errors import ConfigError, setting
from ..core.fence import Fence
from ..formats import Calls, Family, ReasoningFormat, resolve_formats
from ..formats.families import call_format, calls_by_name, reasoning_by_name
from ..formats.response_template import UnreadableTemplate, read_response_template
from ..formats.selection import CHECKPOINT_NAMES
from ..guidance.reasoning import CheckpointReasoning
from ..tokens.tokenizer import Tokenizer

GROUP = "vllm_mlx.parsers"
_PAGE = "docs/parsers.md"
_RULES = "response_template"  # the name of formats that the checkpoint's own rules describe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplyFormats:
    """The formats in which replies are read, and their names in the status. None: replies have no such part."""

    reasoning_name: str | None
    calls_name: str | None
    reasoning: ReasoningFormat | None
    calls: Calls | None
    judge: CheckpointReasoning | None  # also where the parser shows no reasoning, if a budget may end it


def check_parsers(config: EngineConfig) -> None:
    """Check the names of parsers without a checkpoint. Raises ConfigError as `reply_formats` does."""
    reasoning = _installed("reasoning_parser", config.reasoning_parser, reasoning_by_name())
    calls = _installed("tool_call_parser", config.tool_call_parser, calls_by_name())
    resolve_formats(
        config.reasoning_parser if reasoning is None else "none",
        config.tool_call_parser if calls is None else "none",
        chat_template=None,
        vocabulary=(),
    )


def reply_formats(config: EngineConfig, tokenizer: Tokenizer) -> ReplyFormats:
    """Raises ConfigError for a name that neither this server nor an installed package knows."""
    reasoning, calls = config.reasoning_parser, config.tool_call_parser
    own_reasoning = _installed("reasoning_parser", reasoning, reasoning_by_name())
    own_calls = _installed("tool_call_parser", calls, calls_by_name())
    known_reasoning, known_calls = resolve_formats(
        reasoning if own_reasoning is None else "none",
        calls if own_calls is None else "none",
        chat_template=tokenizer.chat_template,
        vocabulary=tokenizer,
    )
    rules = _rules(tokenizer, is_asked_for=bool({reasoning, calls} & {*CHECKPOINT_NAMES}))
    if rules.reasoning is not None and _asks_rules(reasoning, known_reasoning):
        own_reasoning, reasoning = rules, rules.name
    if rules.calls is not None and _asks_rules(calls, known_calls):
        own_calls, calls = rules, rules.name
    if own_reasoning is not None and own_reasoning.reasoning is None:
        raise ConfigError(f"{setting('reasoning_parser')} {reasoning}: this parser reads tool calls only.")
    if own_calls is not None and own_calls.calls is None:
        raise ConfigError(f"{setting('tool_call_parser')} {calls}: this parser reads reasoning only.")
    format = known_reasoning if own_reasoning is None else own_reasoning.reasoning
    strings = config.reasoning_config
    judge = None if format is None and strings is None else CheckpointReasoning(tokenizer, format, strings)
    name = known_reasoning if own_reasoning is None else reasoning
    if judge is not None and format is None and reasoning != "none":
        name = "reasoning_config"
    return ReplyFormats(
        reasoning_name=name,
        calls_name=known_calls if own_calls is None else calls,
        reasoning=None if judge is None or name is None else judge.format,
        calls=(None if known_calls is None else call_format(known_calls)) if own_calls is None else own_calls.calls,
        judge=judge,
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
    with Fence("the command, which ends with what to change", is_logged=False) as fence:
        family = entry.load()
    if fence.error is not None:
        raise ConfigError(f"{where} cannot be loaded: {fence.error!r}.") from fence.error
    if not isinstance(family, Family):
        raise ConfigError(f"{where} is no vllm_mlx.formats.Family but a {type(family).__name__}: see {_PAGE}.")
    if not all(tag and isinstance(tag, str) for tag in _tags(family)):
        raise ConfigError(f"{where} lacks a tag, or has one that is empty or no text: see {_PAGE}.")
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
