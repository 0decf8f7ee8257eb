"""`vllm-mlx status`: prints a server's status, once or continuously, over HTTP."""

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from ..core.memory import readable
from ..util.urls import client_name, endpoint_name
from .remote import KeyOption, Remote, UrlOption, find_server
from .terminal import NARROW, AsJson, CommandFailed, console, duration, milliseconds, number_columns, option


def status(
    once: Annotated[bool, option("--once", None, "Print the status once, and end.")] = False,
    as_json: AsJson = False,
    interval: Annotated[
        float,
        option("--interval", "SECONDS", "Seconds between two updates.", show_default=True, min=0.1, max=3600),
    ] = 1.0,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Print what the server is doing: requests, speed, memory, cache. Ctrl-C ends it."""
    server = find_server(url, api_key, as_admin=True)
    screen = console()
    fields = server.status()
    if as_json:
        print(json.dumps(fields, indent=2))
    elif once or not screen.is_terminal:
        screen.print(status_view(server.url, fields))
    else:
        _follow(server, fields, interval, screen)


def _follow(server: Remote, fields: dict[str, Any], interval_s: float, screen: Console) -> None:
    try:
        with Live(status_view(server.url, fields), console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                trouble = None
                try:
                    fields = server.status()
                except CommandFailed as error:  # the server may be restarting: the last fields stay
                    trouble = error.message
                live.update(status_view(server.url, fields, trouble=trouble), refresh=True)
    except KeyboardInterrupt:
        screen.print(status_view(server.url, fields))


_PARTS = (
    ("weights_bytes", "weights", "blue"),
    ("transient_bytes", "working", "red"),
    ("image_bytes", "room for images", "magenta"),
    ("live_bytes", "replies", "green"),
    ("media_bytes", "image features", "cyan"),
    ("cache_bytes", "cache", "yellow"),
)
_BAR_WIDTH = 60
_WAITS = {"disk": ", reads disk", "model": ", waits for the model"}


def status_view(url: str, fields: Mapping[str, Any], *, trouble: str | None = None) -> RenderableType:
    """Show the fields of a server. `trouble` says why they are not the latest."""
    parts: list[RenderableType] = [_head(url, fields)]
    if trouble is not None:
        parts.append(Text(trouble, "bold red"))
    models, requests = fields.get("models") or [], fields.get("requests") or []
    parts += [_figures(fields), *_memory(fields.get("memory") or {})]
    if len(models) > 1:
        parts += [_models(models), Text()]
    parts.append(_requests(requests, has_several=len(models) > 1))
    return Group(*parts)


def _head(url: str, fields: Mapping[str, Any]) -> Text:
    text, models = Text(), fields.get("models") or []
    several = ", ".join(str(row.get("name", "?")) for row in models[1:] and models)
    text.append(several or str(fields.get("model") or "no model was asked for yet"), "bold")
    if not several and models and models[0].get("state", "ready") != "ready":
        text.append(f"  {_state(models[0])}", "yellow")
    text.append(f"  {fields.get('status', '?')}", "green" if fields.get("status") == "running" else "dim")
    text.append(f"  {url}  up {duration(float(fields.get('uptime_s', 0)))}\n", "dim")
    return text


def _state(row: Mapping[str, Any]) -> str:
    """Describe the state of the weights."""
    state, progress = row.get("state", "ready"), row.get("progress")
    share = "" if progress is None else f" {progress:.0%}"
    return f"{state}{share}" + (f": {row['cause']}" if state == "failed" and row.get("cause") else "")


def _models(rows: list[Mapping[str, Any]]) -> Table:
    numbers = number_columns("Weights", "Running", "Waiting", "Done", "tokens/s", "Last used", "Last load")
    table = Table(Column("Model", overflow="fold"), *numbers, **NARROW)
    for row in rows:
        table.add_row(
            Text(f"{row.get('name', '?')}\n{_state(row)}" + (", pinned" if row.get("pinned") else "")),
            readable(row["weights_bytes"]) if row.get("weights_bytes") else "–",
            f"{row.get('running', 0):,}",
            f"{row.get('waiting', 0):,}",
            f"{row.get('total_requests_processed', 0):,}",
            f"{row.get('generation_tps', 0):,.1f}",
            "now" if row.get("running") or row.get("waiting") else duration(float(row.get("last_used_s") or 0)),
            duration(float(row["load_s"])) if row.get("load_s") else "–",
        )
    return table


def _figures(fields: Mapping[str, Any]) -> Table:
    grid = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, fact in _rows(fields):
        grid.add_row(Text(name, "dim"), Text(fact))
    return grid


def _rows(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("Requests", f"{fields.get('num_running', 0)} running, {fields.get('num_waiting', 0)} waiting, "
                     f"{fields.get('total_requests_processed', 0):,} done"),
        ("Speed", f"{fields.get('generation_tps', 0):,.1f} tokens/s written, {fields.get('prompt_tps', 0):,.0f} read"),
    ]  # fmt: skip
    if latency := fields.get("latency"):
        waits = [("first token", "ttft_s"), ("between tokens", "inter_token_s")]
        rows.append(("Latency", ", ".join(_wait(name, latency.get(key) or {}) for name, key in waits)))
    prompt, cached = fields.get("total_prompt_tokens", 0), fields.get("total_cached_tokens", 0)
    share = f", {cached / prompt:.0%} of them from the cache" if prompt else ""
    rows.append(("Tokens", f"{prompt:,} of prompts{share}; {fields.get('total_completion_tokens', 0):,} of replies"))
    if texts := fields.get("total_encoded_inputs"):
        rows.append(("Encoded", f"{texts:,} texts, {fields.get('total_encoded_tokens', 0):,} tokens"))
    if (drafts := fields.get("drafts") or {}).get("num_drafts"):
        rows.append(("Drafts", _drafts(drafts)))
    cache = fields.get("cache") or {}
    rows.append(("Cache", _cache(cache)))
    if "disk" in cache:
        rows.append(("On disk", disk_line(cache["disk"])))
    rows += [(f"Rank {rank['rank']}", _rank(rank)) for rank in fields.get("ranks") or ()]
    if errors := fields.get("last_errors"):
        last = errors[0]  # the words of another API key's error are hidden
        rows.append(("Last error", str(last.get("message") or last.get("code") or f"HTTP {last.get('status', '?')}")))
    return rows


def _wait(name: str, quantiles: Mapping[str, Any]) -> str:
    seconds = [quantiles.get("p50"), quantiles.get("p99")]
    return f"{name} " + " / ".join("–" if value is None else milliseconds(float(value)) for value in seconds)


def _drafts(drafts: Mapping[str, Any]) -> str:
    drafted, accepted = drafts["drafted_tokens"], drafts["accepted_tokens"]
    shares = ", ".join(
        f"{accepted.get(source, 0) / number:.0%} of {source}" for source, number in drafted.items() if number
    )
    parked = f"; parked: {drafts['parked']}" if drafts["parked"] else ""
    num_drafted, num_accepted = sum(drafted.values()), sum(accepted.values())
    return (
        f"{num_accepted:,} of {num_drafted:,} tokens accepted ({shares}), {drafts['tokens_per_pass']:.1f} tokens "
        f"a pass{parked}"
    )


def _cache(cache: Mapping[str, Any]) -> str:
    if not cache.get("enabled"):
        return "off"
    kinds = ", ".join(f"{count} {kind}" for kind, count in (cache.get("hits_by_kind") or {}).items() if count)
    hits = f"{cache.get('hits', 0)} hits" + (f" ({kinds})" if kinds else "")
    return f"{hits}, {cache.get('misses', 0)} misses; {cache.get('entry_count', 0)} entries, {held_line(cache)}"


def _rank(rank: Mapping[str, Any]) -> str:
    """Describe one of several Macs that run the model."""
    memory = " of ".join(readable(rank[key]) for key in ("active_bytes", "limit_bytes"))
    lag = f", {rank['lag_plans']} behind for {milliseconds(rank['lag_s'])}" if rank["lag_plans"] else ""
    return f"{rank['host']}, {memory}; plan {rank['plan']:,}{lag}; a sum takes {rank['sum_s'] * 1000:.2f} ms"


def held_line(cache: Mapping[str, Any]) -> str:
    """Describe the used share of the prefix cache's memory."""
    return " of ".join(readable(cache.get(key, 0) * 1e6) for key in ("current_memory_mb", "max_memory_mb"))


def disk_line(disk: Mapping[str, Any] | None) -> str:
    """Describe the server's cache on disk on one line."""
    if disk is None:
        return "off"
    if disk["off_reason"] is not None:
        return f"off: {disk['off_reason']}"
    held = f"{readable(disk['used_bytes'])} of {readable(disk['max_bytes'])} in {disk['num_records']:,} records"
    written = f"{readable(disk['written_today_bytes'])} of {readable(disk['daily_bytes'])} written today"
    parts = [held, written]
    if disk["hits"]:
        parts.append(f"{disk['hits']:,} requests read {disk['tokens_read']:,} tokens, {readable(disk['bytes_read'])}")
    if disk["num_damaged"]:
        parts.append(f"{disk['num_damaged']:,} damaged records removed")
    return "; ".join(parts)


def _memory(memory: Mapping[str, Any]) -> list[RenderableType]:
    total = int(memory.get("total_bytes") or 0)
    if not total:
        return []
    bar, legend = Text(), Text()
    filled = 0
    for key, name, colour in _PARTS:
        num_bytes = int(memory.get(key) or 0)
        if not num_bytes:
            continue
        # Even the smallest part is visible.
        width = min(max(1, round(_BAR_WIDTH * num_bytes / total)), _BAR_WIDTH - filled)
        filled += width
        bar.append("█" * width, colour)
        legend.append("■ ", colour)
        legend.append(f"{name} {readable(num_bytes)}  ")
    bar.append("░" * (_BAR_WIDTH - filled), "dim")
    bar.append(f"  of {readable(total)}")
    return [Text(), bar, legend, Text()]


def _requests(requests: list[Mapping[str, Any]], *, has_several: bool) -> RenderableType:
    if not requests:
        return Text("No request is running.", "dim")
    numbers = number_columns("Prompt", "Cached", "Written", "tokens/s", "TTFT", "Time")
    table = Table(Column("Request", overflow="fold"), *numbers, **NARROW)
    for request in requests:
        table.add_row(*_row(request, f"{request.get('model')}, " if has_several else ""))
    return table


def _row(request: Mapping[str, Any], model: str) -> list[RenderableType]:
    ttft_s = request.get("ttft_s")
    phase = str(request.get("phase", "?")) + _WAITS.get(str(request.get("waits_for")), "")
    client = client_name(request.get("client")) if request.get("request_id") else "–"  # of another API key
    caller = f"{client} {endpoint_name(request.get('path') or '')}"
    return [
        Text(f"{caller}\n{model}{phase}, {float(request.get('progress') or 0):.0%}"),
        f"{request.get('prompt_tokens', 0):,}",
        f"{request.get('cached_tokens', 0):,}" + ("\n(disk)" if request.get("tier") == "disk" else ""),
        f"{request.get('completion_tokens', 0):,}",
        f"{request.get('tokens_per_second') or 0:.1f}",
        "" if ttft_s is None else milliseconds(float(ttft_s)),
        duration(float(request.get("elapsed_s") or 0)),
    ]
