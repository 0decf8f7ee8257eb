"""What starts a client: environment, files, commands; and the same as a shell script. Starts and writes nothing."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..terminal import one_line

NO_KEY = "none"  # sent where the server asks for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that a client is pointed at, and where files for the client may lie: a folder of ours."""

    url: str  # without /v1
    model: str
    context: int  # tokens of prompt and reply
    api_key: str  # a word that means nothing, where the server asks for none
    folder: Path

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def max_reply(self) -> int:
        """Tokens of a reply that clients keep free in the window: a quarter of it, within reason."""
        return max(1, min(32_000, self.context // 4))


@dataclass(frozen=True, slots=True)
class JsonEntries:
    """Values that a JSON file of the client's user shall hold; what else it holds stays."""

    path: Path
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextLines:
    """Lines for the end of a file of the client's user, unless it says something on `marker` already."""

    path: Path
    marker: str
    text: str


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file in the client's folder that is ours alone."""

    path: Path
    text: str


Lasting = JsonEntries | TextLines | OwnFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    commands: tuple[tuple[str, ...], ...]  # the last one is the client itself
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables that would win over those
    files: Mapping[Path, str] = field(default_factory=dict)  # in the target's folder
    first_prompt: int = 0  # tokens that the client's first prompt takes, about
    warning: str = ""  # what its user should know before it is started
    lasting: Lasting | None = None  # what `--write` writes; None: the client has no such file

    def script(self, title: str) -> str:
        """Does in a shell what `launch` does."""
        lines = [f"# {one_line(comment)}" for comment in (title, self.warning) if comment]
        for path, text in self.files.items():  # for their owner's eyes, as `write_own` makes them
            lines += ["(", "umask 077", f"mkdir -p {shlex.quote(str(path.parent))}"]
            lines += [f"cat > {shlex.quote(str(path))} <<'END'", text.rstrip("\n"), "END", ")"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [f"unset {name}" for name in self.unset]
        return "\n".join([*lines, *(shlex.join(command) for command in self.commands)]) + "\n"


def pretty(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
