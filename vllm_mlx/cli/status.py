"""`vllm-mlx status`: what a server does right now, once or as it changes. Asks over HTTP alone."""

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from .failures import CommandFailed
from .remote import KeyOption, Remote, UrlOption, find_server
from .status_view import status_view
from .terminal import console


def status(
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the server says, as JSON, and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Time between two looks.")
    ] = 1.0,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show what the server is doing: requests, speed, memory, cache. Ctrl-C ends it."""
    server = find_server(url, api_key, as_admin=True)
    screen = console()
    fields = server.get("/v1/status")
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
                fields, view = _look(server, fields)
                live.update(view, refresh=True)
    except KeyboardInterrupt:
        screen.print(status_view(server.url, fields))


def _look(server: Remote, last: dict[str, Any]) -> tuple[dict[str, Any], RenderableType]:
    """A server that is started again is followed on."""
    try:
        fields = server.get("/v1/status")
    except CommandFailed as error:
        return last, status_view(server.url, last, trouble=error.message)
    return fields, status_view(server.url, fields)
