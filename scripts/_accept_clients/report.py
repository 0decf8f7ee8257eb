"""Outcomes as a Markdown table."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from .session import Outcome


def print_sessions(outcomes: Sequence[Outcome], left_out: Sequence[tuple[str, str]], console: Console) -> None:
    """Print a row for each session. `left_out`: clients without a session, and the reason."""
    table = _table(
        "client", "version", "requests", "replies by model", "calls it ran", "seconds", "wanted elsewhere", "accepted"
    )
    for one in outcomes:
        table.add_row(
            one.client.name,
            one.client.version,
            str(len(one.seen)),
            ", ".join(f"{name} {number}" for name, number in (one.by_model or {}).items() if number),
            f"{one.num_calls}{', the right ones' if one.is_right else ''}",
            f"{one.wall_s:.1f}",
            ", ".join(one.elsewhere) or "nothing",
            verdict(one),
        )
    for name, why in left_out:
        table.add_row(name, "", "", "", "", "", "", f"not run: {why}")
    console.print(table)


def verdict(one: Outcome) -> str:
    if one.complaints:
        return f"no: {'; '.join(one.complaints)}"
    return "yes, but it lost the output of the command that ended at once" if one.has_lost else "yes"


def _table(*names: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for name in names:
        table.add_column(name, overflow="fold")
    return table
