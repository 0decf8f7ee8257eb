"""What to keep when room is short: seconds of prefill on recorded sessions, beside two other rules. Not measured."""

import argparse
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tests.support.keep_comparison import DEVICES, Comparisons, Tier
from tests.support.keep_simulation import Spent
from tests.support.recorded_sessions import requests_of

SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
PEOPLE = (4, 8, 16)
_FILE_WIDTH = 140
_COLUMNS = ("share", "ours", "least recently used", "clairvoyant", "÷ least recently used", "÷ clairvoyant")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench keep",
        description="Runs the prefix planner on recorded sessions with little room to keep their state. Prints the "
        "seconds of computing or reading again what had been computed, and all seconds of prompts over those of the "
        "other rules. Devices are computed; nothing is measured.",
    )
    parser.add_argument("--people", type=int, action="append", metavar="N", help="how many work (default: 4, 8 and 16)")
    parser.add_argument("--kind", action="append", choices=DEVICES, help="of model; repeat it for more (default: all)")
    given = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    for people in given.people or PEOPLE:
        requests = requests_of(people=people)
        for kind in given.kind or DEVICES:
            _print(console, people, kind, Comparisons(DEVICES[kind], requests))


def _print(console: Console, people: int, kind: str, comparisons: Comparisons) -> None:
    device = DEVICES[kind]
    for tier in Tier:
        wanted = f"{comparisons.wanted_bytes / 1e9:.1f} GB wanted, at least {comparisons.least_s:.0f} s of prefill"
        title = f"{people} people, {device.shape.name}, {device.chip.name}, {tier.value}: {wanted}"
        table = Table(box=box.MARKDOWN)
        for column in _COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for share in SHARES:
            found = comparisons.at(share, tier)
            again = [f"{found.again_s(spent):.1f}" for spent in (found.ours, found.lru, found.clairvoyant)]
            over = [_over(found.ours, other) for other in (found.lru, found.clairvoyant)]
            table.add_row(f"{share:.0%}", *again, *over)
        console.print(f"\n{title}\n", highlight=False)
        console.print(table)


def _over(ours: Spent, other: Spent) -> str:
    return f"{ours.total_s / other.total_s:.3f}"
