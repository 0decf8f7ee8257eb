"""The types of the table of clients, which says how `launch` installs each client, sets it up and starts it.

The table holds templates: `{model}` and the other names of `Target.values` stand for the server's values. This module
starts and writes nothing. See docs/clients.
"""

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .client_files import JsonEntries, OwnFile, SettingsChange, TextLines, as_json, text_of
from .terminal import one_line

NO_KEY = "none"  # sent where the server asks for none
PROVIDER = "vllm-mlx"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that a client is set up for, and the folders of the client's files."""

    url: str  # without /v1
    model: str
    context: int  # tokens of prompt and reply
    api_key: str  # `NO_KEY` if the server needs none
    folder: Path  # where `launch` writes its own files
    searches: bool = False  # whether the server runs web searches
    home: Path = field(default_factory=Path.home)
    is_mac: bool = sys.platform == "darwin"

    @property
    def support(self) -> Path:
        """Where the platform's applications keep their settings."""
        return self.home / "Library" / "Application Support" if self.is_mac else self.home / ".config"

    @property
    def max_reply(self) -> int:
        """Tokens that clients keep free for a reply: a quarter of the context, at most 32,000."""
        return max(1, min(32_000, self.context // 4))

    def values(self) -> Mapping[str, str | int]:
        """What the names in the table's templates stand for."""
        return {
            "url": self.url,
            "base_url": f"{self.url}/v1",
            "model": self.model,
            "context": self.context,
            "max_prompt": self.context - self.max_reply,
            "max_reply": self.max_reply,
            "key": self.api_key,
            "folder": str(self.folder),
            "home": str(self.home),
            "support": str(self.support),
            "web_search": "live" if self.searches else "disabled",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps to install a client, to set it up for a server, and to start it."""

    title: str
    install: str
    commands: tuple[
        tuple[str, ...], ...
    ]  # the last one starts the client; none: it is an editor, which has only settings
    arguments: tuple[str, ...]  # the client's last ones: the user's, or the ones that it needs if the user gives none
    environment: Mapping[str, str]
    unset: tuple[str, ...]
    files: Mapping[Path, str]  # in the target's folder
    first_prompt: int
    least_context: int  # tokens without which the client does not start
    warning: str  # what the user should know before the client starts
    settings: SettingsChange | None  # made by `--write`; None: the client has no settings file
    after_writing: str  # what the user has to do after that

    def script(self, title: str) -> str:
        """A shell script that does what `launch` does."""
        lines = [f"# {one_line(comment)}" for comment in (title, self.warning) if comment]
        for path, text in self.files.items():  # only their owner may read them, as with `write_own`
            lines += ["(", "umask 077", f"mkdir -p {shlex.quote(str(path.parent))}"]
            lines += [f"cat > {shlex.quote(str(path))} <<'END'", text.rstrip("\n"), "END", ")"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [f"unset {name}" for name in self.unset]
        if not self.commands and self.settings is not None:
            lines += [f"# Merge that file into {self.settings.path}, or let --write do it."]
        return "\n".join([*lines, *(shlex.join(command) for command in self.runs)]) + "\n"

    @property
    def runs(self) -> tuple[tuple[str, ...], ...]:
        """The commands, with the last arguments of the client."""
        return (*self.commands[:-1], (*self.commands[-1], *self.arguments)) if self.commands else ()


@dataclass(frozen=True, slots=True)
class AsJson:
    """A document as JSON on one line, between two texts: a variable, a flag or a part of a file."""

    document: Any
    prefix: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The settings file that `--write` changes: `merge` a document into it, `append` lines, or write an `own` file."""

    path: str
    document: Any
    how: Literal["merge", "append", "own"] = "merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One row of the table. Every text, also in documents, is a template."""

    title: str
    install: str
    program: str = ""  # empty: an editor, which takes its models only from its settings
    flags: tuple[str | AsJson, ...] = ()
    default_arguments: tuple[str, ...] = ()  # the last ones, if the user gives none
    before: tuple[str, ...] = ()  # arguments of a run before the client's, which signs in
    environment: Mapping[str, str | AsJson] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables that would override these
    files: Mapping[str, Any] = field(default_factory=dict)  # documents by path below the target's folder
    first_prompt: int = 0  # about how many tokens the client's first prompt has
    least_context: int = 0
    shows_key: str = ""  # a warning, if the server has a key
    settings: SettingsFile | None = None
    after_writing: str = ""

    def plan(self, target: Target) -> Plan:
        values = target.values()

        def texts(templates: tuple[str | AsJson, ...]) -> tuple[str, ...]:
            return tuple(_on_one_line(template, values) for template in templates)

        runs = [texts(run) for run in ([self.before] if self.before else []) + [self.flags]]
        files = {target.folder / path: document for path, document in self.files.items()}
        return Plan(
            title=self.title,
            install=self.install,
            commands=tuple((self.program, *run) for run in runs) if self.program else (),
            arguments=self.default_arguments,
            environment={name: _on_one_line(value, values) for name, value in self.environment.items()},
            unset=self.unset,
            files={path: _file(path, document, values) for path, document in files.items()},
            first_prompt=self.first_prompt,
            least_context=self.least_context,
            warning=self.shows_key if target.api_key != NO_KEY else "",
            settings=None if self.settings is None else _settings_change(self.settings, values),
            after_writing=str(fill(self.after_writing, values)),
        )


def fill(template: Any, values: Mapping[str, str | int]) -> Any:
    """Replace the names in a template by their values.

    A text that is only one name becomes its value, which may be a number; with `!s`, as in `{context!s}`, it is a text.
    """
    match template:
        case str():
            if (whole := _NAME.fullmatch(template)) is not None:
                return str(values[whole[1]]) if whole[2] else values[whole[1]]
            return _NAME.sub(lambda name: str(values[name[1]]), template)
        case Mapping():
            return {fill(key, values): fill(value, values) for key, value in template.items()}
        case list():
            return [fill(entry, values) for entry in template]
        case _:
            return template


_NAME = re.compile(r"\{([a-z_]+)(!s)?\}")


def _on_one_line(template: str | AsJson, values: Mapping[str, str | int]) -> str:
    if isinstance(template, str):
        return str(fill(template, values))
    document = fill(template.document, values)
    return template.prefix + as_json(document) + template.suffix


def _file(path: Path, template: Any, values: Mapping[str, str | int]) -> str:
    if isinstance(template, AsJson):
        return _on_one_line(template, values) + "\n"
    return text_of(path, fill(template, values))


def _settings_change(file: SettingsFile, values: Mapping[str, str | int]) -> SettingsChange:
    path, document = Path(str(fill(file.path, values))), fill(file.document, values)
    match file.how:
        case "merge":
            return JsonEntries(path, document)
        case "append":
            text = text_of(path, document)
            return TextLines(path, text.partition(":")[0] + ":", text)
        case "own":
            return OwnFile(path, text_of(path, document))
