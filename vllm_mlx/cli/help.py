"""The layout of `--help`: each flag on its own line, its text below it, within 80 columns. Knows no command."""

import inspect
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .settings import COMMON, PANELS
from .terminal import WrongUsage

_MANY = 50  # parameters, of which the help shows the common ones only
_ALL = "vllm_mlx.help_all"  # a key of click's context
_ADDRESS = dict.fromkeys(("--host", "--port"), "Use `--url http://127.0.0.1:PORT`.")


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises WrongUsage with a hint for a flag of another server, or of `serve` alone."""
        known = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
        usual = hints("flags.toml") if ctx.info_name == "serve" else _ADDRESS if "--url" in known else {}
        for flag in (arg.partition("=")[0] for arg in takewhile("--".__ne__, args)):
            if flag not in known and (hint := usual.get(flag)):
                words = ctx.command_path.removeprefix(ctx.find_root().command_path)
                raise WrongUsage(f"`vllm-mlx{words}` has no flag `{flag}`. {hint}")
        return list(super().parse_args(ctx, args))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


class Group(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is named. Raises WrongUsage with a hint for the word of another program."""
        words = args[0] if ctx.parent is None else f"{ctx.info_name} {args[0]}"
        if args[0] not in self.commands and (hint := hints().get(words)):
            raise WrongUsage(f"`vllm-mlx {words}` is not a command. {hint}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)
        commands = [self.commands[name] for name in self.list_commands(ctx)]
        rows = [(each.name, inspect.cleandoc(each.help or "").split("\n\n")[0]) for each in commands if not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def hints(file: str = "hints.toml") -> dict[str, str]:
    """Return the replacements of words and flags of other programs, by the word or flag."""
    table = tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    return {word: hint for hint, words in table.items() for word in words}


def examples(*lines: str) -> str:
    """Return an epilog of these command lines, none of which is wrapped."""
    return "\n".join(["\b", "Examples:", *(f"  vllm-mlx {line}" for line in lines)])


def show_all(context: typer.Context, is_wanted: bool) -> None:
    """Print the help with every setting, if the flag was given."""
    if is_wanted:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str]]] = {}
    is_long = len(command.params) > _MANY
    for parameter in command.get_params(ctx):
        is_argument = parameter.param_type_name == "argument"
        heading = "Arguments" if is_argument else parameter.rich_help_panel or "Options"
        if heading in PANELS and is_long and _ALL not in ctx.meta:
            heading = "Common settings" if parameter.name in COMMON else ""
        if heading and (record := parameter.get_help_record(ctx)) is not None:
            name = parameter.metavar or parameter.name.upper() if is_argument else record[0]
            panels.setdefault(heading, []).append((typer.style(name, bold=True), record[1]))
    for heading, rows in panels.items():
        with formatter.section(heading):
            formatter.write_dl(rows, col_max=2, col_spacing=2)  # no name fits, so each text begins on the next line
