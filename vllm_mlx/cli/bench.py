"""`vllm-mlx bench`: measures how fast a server answers, over HTTP. Any server with OpenAI's API will do."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich import box
from rich.table import Table

from .load import Asker, Sizes, Timed, Words, Workload, conversations, run_load
from .remote import KeyOption, Remote, UrlOption, find_server
from .terminal import CommandFailed, WrongUsage, console, milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one workload at one concurrency. A figure without measurements is None."""

    workload: str
    concurrency: int
    requests: int
    failed: int
    first_error: str | None
    seconds: float  # from the first request to the last part of a reply
    prompt_tokens: int  # prompt tokens of all requests; 0 if the server does not count them
    cached_tokens: int
    reply_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None  # between two parts of a reply
    itl_p99_s: float | None
    tokens_per_s: float  # tokens per second of all replies together

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def figures(workload: str, concurrency: int, replies: Sequence[Timed]) -> Figures:
    good = [reply for reply in replies if reply.error is None]
    errors = [reply.error for reply in replies if reply.error is not None]
    ttfts = [reply.moments[0] - reply.sent_s for reply in good]
    gaps = [later - earlier for reply in good for earlier, later in pairwise(reply.moments)]
    seconds = max(reply.moments[-1] for reply in good) - min(reply.sent_s for reply in good) if good else 0.0
    reply_tokens = sum(reply.num_tokens for reply in good)
    return Figures(
        workload=workload,
        concurrency=concurrency,
        requests=len(replies),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        seconds=seconds,
        prompt_tokens=sum(int(reply.usage.get("prompt_tokens") or 0) for reply in good),
        cached_tokens=sum(_cached(reply) for reply in good),
        reply_tokens=reply_tokens,
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p99_s=quantile(ttfts, 0.99),
        itl_p50_s=quantile(gaps, 0.5),
        itl_p99_s=quantile(gaps, 0.99),
        tokens_per_s=reply_tokens / seconds if seconds else 0.0,
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)
    return ordered[max(0, int(rank) - 1)]


def _cached(reply: Timed) -> int:
    return int((reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


_WORKLOADS: tuple[Workload, ...] = get_args(Workload)
_MAX_CONCURRENCY = 256


def bench(
    workload: Annotated[
        str, typer.Option("--workload", metavar="LIST", help="`new` prompts, a `shared` beginning, growing `turns`.")
    ] = ",".join(_WORKLOADS),
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="LIST", help="Numbers of requests that run at once.")
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
    for workload in chosen:
        for step in steps:
            print(f"{workload}, {step} at once …", file=sys.stderr)
            rows.append(_measure(asker, workload, step, requests, sizes, words))
    _show(server, name, rows, as_json=as_json, plot=plot)
    if failed := next((row.first_error for row in rows if row.first_error), None):
        raise CommandFailed(f"{sum(row.failed for row in rows)} requests failed, the first with: {failed}")


def _measure(asker: Asker, workload: Workload, step: int, num_requests: int, sizes: Sizes, words: Words) -> Figures:
    # There are as many conversations as requests run at once.
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
    chosen = [workload for workload in _WORKLOADS if workload in names]
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
            *("–" if seconds is None else milliseconds(seconds) for seconds in _times(row)),
            f"{row.tokens_per_s:,.1f}",
        )
    return table


def _times(row: Figures) -> tuple[float | None, ...]:
    return row.ttft_p50_s, row.ttft_p99_s, row.itl_p50_s, row.itl_p99_s


_COLOURS = {"new": "#2563eb", "shared": "#059669", "turns": "#d97706"}
_WIDTH, _HEIGHT, _MARGIN = 280, 200, 48
_CHARTS: tuple[tuple[str, Callable[[Figures], float | None]], ...] = (
    ("tokens/s of all replies", lambda each: each.tokens_per_s),
    ("TTFT p50, ms", lambda each: None if each.ttft_p50_s is None else each.ttft_p50_s * 1000),
    ("ITL p99, ms", lambda each: None if each.itl_p99_s is None else each.itl_p99_s * 1000),
)


def svg(title: str, rows: Sequence[Figures]) -> str:
    width = len(_CHARTS) * (_WIDTH + _MARGIN) + _MARGIN
    height = _HEIGHT + 3 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_MARGIN}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(_CHARTS):
        parts += _chart(name, value, rows, left=_MARGIN + number * (_WIDTH + _MARGIN))
    for number, workload in enumerate(dict.fromkeys(row.workload for row in rows)):
        x, y = _MARGIN + number * 110, height - 12
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_COLOURS[workload]}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}">{workload}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _chart(name: str, value: Callable[[Figures], float | None], rows: Sequence[Figures], left: int) -> list[str]:
    top, bottom = 2 * _MARGIN - 30, 2 * _MARGIN - 30 + _HEIGHT
    steps = sorted({row.concurrency for row in rows})
    known = [(row, found) for row in rows if (found := value(row)) is not None]
    highest = max((found for _, found in known), default=0.0) or 1.0
    spread = max(1, len(steps) - 1)

    def place(row: Figures, found: float) -> tuple[float, float]:
        x = left + steps.index(row.concurrency) * (_WIDTH - 20) / spread
        return x, bottom - found / highest * (_HEIGHT - 20)

    parts = [
        f'<text x="{left}" y="{top - 4}">{escape(name)}</text>',
        f'<path d="M{left} {top}V{bottom}H{left + _WIDTH - 20}" fill="none" stroke="#999"/>',
        f'<text x="{left - 4}" y="{top + 24}" text-anchor="end" fill="#666">{highest:.3g}</text>',
    ]
    for step in steps:
        x = left + steps.index(step) * (_WIDTH - 20) / spread
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#666">{step}</text>')
    for workload in dict.fromkeys(row.workload for row in rows):
        points = [place(row, found) for row, found in known if row.workload == workload]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS[workload]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[workload]}"/>' for x, y in points]
    return parts
