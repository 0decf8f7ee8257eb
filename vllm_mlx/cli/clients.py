"""The clients that `launch` starts: one table says how each is installed, and its environment, file and flags.

The table holds templates: `{model}` and the other names of `Target.values` stand for the server's own. This module
starts and writes nothing. See docs/clients.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .client_files import JsonEntries, Lasting, OwnFile, TextLines, text_of
from .terminal import one_line

NO_KEY = "none"  # sent where the server asks for none
PROVIDER = "vllm-mlx"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that a client shall use, and the folders in which the client's files are."""

    url: str  # without /v1
    model: str
    context: int  # tokens of prompt and reply
    api_key: str  # `NO_KEY` if the server needs none
    folder: Path  # where our own files for clients are
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
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to install a client, start it, and set it up for a server."""

    title: str
    install: str
    commands: tuple[tuple[str, ...], ...]  # the last one is the client itself; none: it is an editor with settings only
    alone: tuple[str, ...]  # the last arguments: what the user gives, or what is needed without any
    environment: Mapping[str, str]
    unset: tuple[str, ...]
    files: Mapping[Path, str]  # in the target's folder
    first_prompt: int
    least_context: int  # tokens without which the client does not start
    warning: str  # what the user should know before the client starts
    lasting: Lasting | None  # what `--write` writes; None: the client has no such file
    after_writing: str  # what to do then

    def script(self, title: str) -> str:
        """A shell script that does what `launch` does."""
        lines = [f"# {one_line(comment)}" for comment in (title, self.warning) if comment]
        for path, text in self.files.items():  # only their owner may read them, as with `write_own`
            lines += ["(", "umask 077", f"mkdir -p {shlex.quote(str(path.parent))}"]
            lines += [f"cat > {shlex.quote(str(path))} <<'END'", text.rstrip("\n"), "END", ")"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [f"unset {name}" for name in self.unset]
        if not self.commands and self.lasting is not None:
            lines += [f"# Merge that file into {self.lasting.path}, or let --write do it."]
        return "\n".join([*lines, *(shlex.join(command) for command in self.runs)]) + "\n"

    @property
    def runs(self) -> tuple[tuple[str, ...], ...]:
        """The commands, with the last arguments of the client."""
        return (*self.commands[:-1], (*self.commands[-1], *self.alone)) if self.commands else ()


@dataclass(frozen=True, slots=True)
class AsJson:
    """A document that is given on one line, as a variable, a flag or a part of a file, between two texts."""

    document: Any
    prefix: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """The user's own file that `--write` changes: `merge` a document, `append` lines, or write a file of `our` own."""

    path: str
    document: Any
    how: Literal["merge", "append", "our"] = "merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One row of the table. Every text, also in documents, is a template."""

    title: str
    install: str
    program: str = ""  # empty: an editor, which takes its models from its settings only
    flags: tuple[str | AsJson, ...] = ()
    alone: tuple[str, ...] = ()  # arguments if the user gives none
    before: tuple[str, ...] = ()  # arguments of a first run, which signs in
    environment: Mapping[str, str | AsJson] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables that would override these
    files: Mapping[str, Any] = field(default_factory=dict)  # documents by path below the target's folder
    first_prompt: int = 0  # tokens of the client's first prompt, about
    least_context: int = 0
    shows_key: str = ""  # a warning, if the server has a key
    kept: Kept | None = None
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
            alone=self.alone,
            environment={name: _on_one_line(value, values) for name, value in self.environment.items()},
            unset=self.unset,
            files={path: _file(path, document, values) for path, document in files.items()},
            first_prompt=self.first_prompt,
            least_context=self.least_context,
            warning=self.shows_key if target.api_key != NO_KEY else "",
            lasting=None if self.kept is None else _lasting(self.kept, values),
            after_writing=str(fill(self.after_writing, values)),
        )


def fill(template: Any, values: Mapping[str, str | int]) -> Any:
    """The template with its names replaced.

    A text that is one name alone becomes its value, which may be a number; `{context!s}` stays a text.
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
    return template.prefix + json.dumps(document) + template.suffix


def _file(path: Path, template: Any, values: Mapping[str, str | int]) -> str:
    if isinstance(template, AsJson):
        return _on_one_line(template, values) + "\n"
    return text_of(path, fill(template, values))


def _lasting(kept: Kept, values: Mapping[str, str | int]) -> Lasting:
    path, document = Path(str(fill(kept.path, values))), fill(kept.document, values)
    match kept.how:
        case "merge":
            return JsonEntries(path, document)
        case "append":
            text = text_of(path, document)
            return TextLines(path, text.partition(":")[0] + ":", text)
        case "our":
            return OwnFile(path, text_of(path, document))
