"""`vllm-mlx doctor`: one line for each thing the server needs, and what to do where it is missing."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..failures import ExitCode
from ..sources import load_settings
from ..terminal import console
from .check import Check

_MARKS = {"good": ("✓", "green"), "warning": ("!", "yellow"), "bad": ("✗", "bold red")}


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", show_default=False, help="Does it fit? Default: as `serve` is set.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the self-test, which loads the demo.")] = False,
) -> None:
    """Look whether this machine can serve, and what is in the way. Exit code 1: something is."""
    from ..serve import configure_logging

    configure_logging("error")
    checks = []
    screen = console()
    for check in _checks(model, with_self_test=not quick):
        checks.append(check)
        if not as_json:
            screen.print(_line(check))
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    if any(check.verdict == "bad" for check in checks):
        raise typer.Exit(ExitCode.FAILED)


def _checks(model: str | None, *, with_self_test: bool) -> Iterator[Check]:
    """One after the other, as they are known. What needs MLX is left out where MLX does not work."""
    from . import machine
    from .model import check_model, self_test

    settings = load_settings({} if model is None else {"model": model})
    yield machine.check_python()
    device = machine.check_device()
    yield device
    if device.verdict != "bad":
        yield machine.check_memory(settings)
    yield machine.check_downloads()
    yield machine.check_port(settings)
    if device.verdict != "bad":
        yield check_model(settings)
        if with_self_test:
            yield self_test()


def _line(check: Check) -> Table:
    """On a line of its own, text indented below itself."""
    mark, style = _MARKS[check.verdict]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(width=12)
    grid.add_column(overflow="fold")
    name, _, rest = check.name.partition(" ")
    grid.add_row(Text(mark, style), Text(name), Text(f"{rest}: {check.text}" if rest else check.text))
    return grid
