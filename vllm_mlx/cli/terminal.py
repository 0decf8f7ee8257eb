"""Parts of all commands: a console that is safe for untrusted text, readable figures, and exit codes."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column

from ..core.errors import ConfigError, VLLMMLXError

# C0, DEL and C1 begin every sequence that moves the cursor, sets the clipboard or renames the window.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
_CONTROLS.pop(ord("\n"))
_CONTROLS.pop(ord("\t"))


def printable(text: str) -> str:
    """Remove control characters except line breaks and tabs. The result does not depend on where a text was cut."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Return the words of a text on one line, without control characters."""
    return " ".join(printable(text).split())


def option(flag: str, metavar: str | None, text: str, *, show_default: bool = False, **limits: Any) -> Any:
    """Return a Typer option. `text` is its help, which explains the default unless `show_default` is set."""
    return typer.Option(flag, metavar=metavar, help=text, show_default=show_default, **limits)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


TABLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1)}  # how tables look
NARROW: dict[str, Any] = {**TABLE, "padding": 0}  # how tables of many numbers look


def number_columns(*names: str) -> Iterator[Column]:
    """Make columns of numbers for a table. Where the terminal is too narrow, they are folded and never cut."""
    return (Column(name, justify="right", overflow="fold") for name in names)


class SafeConsole(Console):
    """A console of rich. Only its own styles control the terminal: control characters in texts are removed."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def console() -> SafeConsole:
    return SafeConsole(highlight=False)


def note(text: str) -> None:
    """Print a remark that is not part of a command's output."""
    print(f"vllm-mlx: {text}", file=sys.stderr)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def state_folder() -> Path:
    """Return the folder of files that the commands keep between two runs."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "vllm-mlx"


def confirm(what: str, *, is_sure: bool) -> None:
    """Ask, on a terminal. Raises WrongUsage elsewhere, and CommandFailed if the answer is no."""
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise WrongUsage(f"{what} Add --yes to do that without a question.")
    print(f"{what} Continue? [y/N] ", end="", file=sys.stderr, flush=True)  # not in the output of --json
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandFailed("Nothing was removed.")


def choose(what: str, names: Sequence[str]) -> int:
    """Ask on a terminal for one of the names. Raises WrongUsage elsewhere, and for another answer."""
    rows = [f"{number:3}  {name}" for number, name in enumerate(names, 1)]
    print("\n".join(rows), f"Number of the {what}: ", sep="\n", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip() if sys.stdin.isatty() else ""
    if not answer.isdecimal() or not 1 <= int(answer) <= len(names):
        raise WrongUsage(f"Choose one of these with --{what}.")
    return int(answer) - 1


class ExitCode(IntEnum):
    """The exit codes that shells and supervisors get."""

    DONE = 0
    FAILED = 1  # exit code of `serve`: a setting, file or machine that cannot serve; a restart would fail again
    USAGE = 2  # the command line is wrong
    RESTART = 75  # EX_TEMPFAIL of sysexits.h: `serve` broke down and can be started again
    INTERRUPTED = 130  # Ctrl-C, as shells count it


class CommandFailed(VLLMMLXError):
    """The command was valid but failed."""

    exit_code = ExitCode.FAILED


class WrongUsage(CommandFailed):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE


class WrongFlag(WrongUsage, ConfigError):
    """A flag has a value that its setting does not take."""


class BrokeDown(CommandFailed):
    """The server ended by an internal error. It can be started again."""

    exit_code = ExitCode.RESTART


def exit_code_of(error: VLLMMLXError) -> ExitCode:
    return error.exit_code if isinstance(error, CommandFailed) else ExitCode.FAILED
