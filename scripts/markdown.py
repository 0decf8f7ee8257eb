"""Tables in Markdown, as the docs show them, on a terminal or in a file."""

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def output(width: int) -> Console:
    """Return the standard output. If it is not a terminal, it has `width` columns."""
    console = Console()
    console.width = console.width if console.is_terminal else width
    return console


def table(names: Iterable[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = ()) -> Table:
    """Return a table whose cells are never cut. The columns `left` are of texts, the others of numbers."""
    made = Table(box=box.MARKDOWN)
    for name in names:
        made.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made
