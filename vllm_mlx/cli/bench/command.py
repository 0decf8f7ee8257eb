"""`vllm-mlx bench`: how fast a server answers, whichever speaks OpenAI's API. Talks HTTP alone."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich import box
from rich.table import Table

from ..failures import CommandFailed, WrongUsage
from ..remote import KeyOption, Remote, UrlOption, find_server
from ..status_view import milliseconds
from ..terminal import console
from .figures import Figures, figures
from .load import Asker, run_load
from .plot import svg
from .workloads import Sizes, Words, Workload, conversations

_WORKLOADS: tuple[Workload, ...] = get_args(Workload)
_MAX_CONCURRENCY = 256


def bench(
    workload: Annotated[
        str, typer.Option("--workload", metavar="LIST", help="`new` prompts, a `shared` beginning, growing `turns`.")
    ] = ",".join(_WORKLOADS),
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="LIST", help="Requests under way at once.")
    ] = "1,4",
    requests: Annotated[
        int, typer.Option("--requests", metavar="INTEGER", min=1, help="Requests of each measurement, at least.")
    ] = 8,
    prompt_words: Annotated[
        int, typer.Option("--prompt-words", metavar="INTEGER", min=1, help="A word is about a token.")
    ] = 500,
    reply_tokens: Annotated[int, typer.Option("--reply-tokens", metavar="INTEGER", min=1, help="Longest reply.")] = 64,
    turns: Annotated[int, typer.Option("--turns", metavar="INTEGER", min=2, help="Of one conversation.")] = 4,
    model: Annotated[
        str | None, typer.Option("--model", metavar="TEXT", show_default=False, help="Default: the one served.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="INTEGER", show_default=False, help="The same prompts as another time. Default: new."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", show_default=False, help="Draw them into an SVG file.")
    ] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Measure time to first token, gaps between tokens and throughput of any OpenAI-compatible server."""
    chosen, steps = _workloads(workload), _steps(concurrency)
    server = find_server(url, api_key)
    name = model or server.model().name
    words = Words(int.from_bytes(os.urandom(8)) if seed is None else seed)
    sizes = Sizes(prompt_words=prompt_words, reply_tokens=reply_tokens, turns=turns)
    asker = Asker(server=server, model=name, reply_tokens=reply_tokens)
    _warm_up(asker, words)
    rows = []
    for each in chosen:
        for step in steps:
            print(f"{each}, {step} at once …", file=sys.stderr)
            rows.append(_measure(asker, each, step, requests, sizes, words))
    _show(server, name, rows, as_json=as_json, plot=plot)
    if failed := next((row.first_error for row in rows if row.first_error), None):
        raise CommandFailed(f"{sum(row.failed for row in rows)} requests failed, the first with: {failed}")


def _measure(asker: Asker, workload: Workload, step: int, num_requests: int, sizes: Sizes, words: Words) -> Figures:
    # As many conversations as are to be under way at once.
    num_requests = max(num_requests, step * (sizes.turns if workload == "turns" else 1))
    todo = conversations(workload, num_requests, sizes, words)
    if workload == "shared":  # its beginning is read once before, and that is not measured
        run_load(asker, todo[:1], 1)
        todo = todo[1:]
    return figures(workload, step, run_load(asker, todo, step))


def _warm_up(asker: Asker, words: Words) -> None:
    """A server compiles and allocates at its first request. Raises CommandFailed where it does not answer at all."""
    timed = asker.ask([{"role": "user", "content": words.text(8)}])
    if timed.error is not None:
        raise CommandFailed(timed.error)


def _workloads(text: str) -> list[Workload]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    chosen = [each for each in _WORKLOADS if each in names]
    if not names or set(names) - set(chosen):
        raise WrongUsage(f"--workload {text}: choose from {', '.join(_WORKLOADS)}, separated by commas.")
    return chosen


def _steps(text: str) -> list[int]:
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        steps = [0]
    if not all(1 <= step <= _MAX_CONCURRENCY for step in steps):
        raise WrongUsage(f"--concurrency {text}: write numbers from 1 to {_MAX_CONCURRENCY}, such as 1,4,8.")
    return sorted(set(steps))


def _show(server: Remote, name: str, rows: list[Figures], *, as_json: bool, plot: Path | None) -> None:
    if plot is not None:
        try:
            plot.write_text(svg(f"{name} at {server.url}, by requests at once", rows), encoding="utf-8")
        except OSError as error:
            raise CommandFailed(f"Cannot write {plot}: {error.strerror}.") from error
    if as_json:
        print(json.dumps({"url": server.url, "model": name, "figures": [asdict(row) for row in rows]}, indent=2))
    else:
        screen = console()
        screen.print(f"{name} at {server.url}", markup=False)
        screen.print(_table(rows))


def _table(rows: list[Figures]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("Workload")
    for name in ("At once", "Requests", "Prompt", "Cached", "TTFT p50", "p99", "ITL p50", "p99", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        good = row.requests - row.failed
        table.add_row(
            row.workload,
            str(row.concurrency),
            f"{row.requests}" + (f", {row.failed} failed" if row.failed else ""),
            f"{row.prompt_tokens // good:,}" if good and row.prompt_tokens else "–",
            "–" if row.cached_share is None else f"{row.cached_share:.0%}",
            *("–" if each is None else milliseconds(each) for each in _times(row)),
            f"{row.tokens_per_s:,.1f}",
        )
    return table


def _times(row: Figures) -> tuple[float | None, ...]:
    return row.ttft_p50_s, row.ttft_p99_s, row.itl_p50_s, row.itl_p99_s
