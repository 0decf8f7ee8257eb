"""Outcomes as Markdown tables. Judges nothing."""

import itertools
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from .relay import Seen
from .samples import Ran
from .session import Outcome


def print_sessions(outcomes: Sequence[Outcome], left_out: Sequence[tuple[str, str]], console: Console) -> None:
    """`left_out`: clients of which no session ran, and why."""
    table = _table("client", "version", "requests", "calls it ran", "seconds", "wanted elsewhere", "accepted")
    for one in outcomes:
        table.add_row(
            one.client.name,
            one.client.version,
            str(len(one.seen)),
            f"{one.num_calls}{', the right ones' if one.is_right else ''}",
            f"{one.wall_s:.1f}",
            ", ".join(one.elsewhere) or "nothing",
            verdict(one),
        )
    for name, why in left_out:
        table.add_row(name, "", "", "", "", "", f"not run: {why}")
    console.print(table)


def verdict(one: Outcome) -> str:
    if one.complaints:
        return f"no: {'; '.join(one.complaints)}"
    return "yes, but it lost the output of the command that ended at once" if one.has_lost else "yes"


def print_faults(outcomes: Sequence[Outcome], console: Console) -> None:
    table = _table("fault", "client", "hit", "sent again after (s)", "then", "exit", "seconds")
    for one in outcomes:
        assert one.fault is not None, "a session without a fault is no part of the matrix"
        hit = [each for each in one.seen if each.fault is not None]
        table.add_row(
            one.fault.name,
            one.client.name,
            str(len(hit)),
            _delays(one.seen),
            "the call ran" if one.is_right else "the call did not run",
            _exit(one),
            f"{one.wall_s:.1f}",
        )
    console.print(table)


def print_samples(ran: Sequence[Ran], left_out: Sequence[tuple[str, str]], console: Console) -> None:
    table = _table("package", "sample", "ran", "requests", "seconds")
    for one in ran:
        requests = ", ".join(f"{path} {status}" for path, status in one.requests)
        table.add_row(
            one.program.package,
            one.program.sample,
            "yes" if one.is_accepted else "no",
            requests or "none",
            f"{one.wall_s:.1f}",
        )
    for package, why in left_out:
        table.add_row(package, why, "left out", "", "")
    console.print(table)


def _delays(seen: Sequence[Seen]) -> str:
    """From each request that failed to the agent's next one."""
    main = [each for each in seen if each.is_main]
    gaps = [f"{later.at_s - one.at_s:.1f}" for one, later in itertools.pairwise(main) if one.fault]
    shown = gaps if len(gaps) <= 12 else [*gaps[:9], "…", *gaps[-2:]]
    return " ".join(shown) or "not"


def _exit(one: Outcome) -> str:
    return "ended by us" if one.exit_code is None else str(one.exit_code)


def _table(*names: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for name in names:
        table.add_column(name, overflow="fold")
    return table
