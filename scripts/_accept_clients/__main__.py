"""The command behind scripts/accept-clients. Its exit code says whether every session was accepted."""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import httpx
from rich import box
from rich.table import Column, Table

from scripts import markdown
from scripts.served import BenchmarkError, free_port, running
from vllm_mlx.cli.clients import CLIENTS as LAUNCHED
from vllm_mlx.cli.remote import Remote
from vllm_mlx.cli.terminal import CommandFailed

from .clients import CLIENTS, NOT_RUN, Setting
from .ending import LIMIT_S, End
from .install import install
from .session import SCRIPTED_COMMANDS, Outcome, run_session

_ROOT = Path(__file__).parents[2]
_WIDTH = 200
_COLUMNS = (
    "client", "version", "requests", "replies by model", "calls", "image", "seconds", "wanted elsewhere", "accepted",
)  # fmt: skip
_LIMIT_S = 900.0  # a model on a CPU takes minutes to read a client's prompt
_SCRIPTED_LIMIT_S = 180.0


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/accept-clients",
        description="Installs coding agents with npm and pip and runs a session of each against the server, with a "
        "home directory that is thrown away, a clean environment, and no connection beyond this machine. The exit code "
        "is 1 if a client could not be installed or its session was not accepted.",
    )
    add = parser.add_argument
    add("--url", help="a running server (default: start one)")
    add("--scripted", action="store_true", help="start a server without a model, which calls the shell twice and ends")
    add("--model", default="demo", metavar="M", help="checkpoint to start a server with (default: the bundled demo)")
    add("--small", metavar="M", help="checkpoint of a smaller model beside it, which gets titles and summaries")
    add(
        "--client",
        action="append",
        choices=list(dict.fromkeys(client.launched for client in CLIENTS)),
        help="run only this one; may repeat",
    )
    add("--image", action="store_true", help="ask each client that can about an image; --scripted always sends one")
    add("--trim", action="store_true", help="give clients as few tools as they allow, so that prompts are short")
    add(
        "--end",
        choices=get_args(End),
        help="end each prompt on the server while it is read or answered, or by --max-request-s; a session is accepted "
        "if the client does not send the prompt again",
    )
    add("--limit-s", type=float, metavar="S", help="end a session after S seconds (default 900; with --scripted 180)")
    add("--folder", type=Path, default=_ROOT / ".clients", help="where clients are installed (default: .clients)")
    add("--json", type=Path, metavar="FILE", help="write every request of the clients there")
    return parser.parse_args(words)


@contextlib.contextmanager
def server(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.url is not None:
        yield arguments.url.rstrip("/").removesuffix("/v1")
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = ["tests.server.scripted", str(port), *SCRIPTED_COMMANDS]
        if not arguments.scripted:
            command = ["vllm_mlx", "serve", "--config", str(_config(arguments, Path(folder))), "--port", str(port)]
        with running([sys.executable, "-m", *command], port):
            yield f"http://127.0.0.1:{port}"


def _config(arguments: argparse.Namespace, folder: Path) -> Path:
    """Write the server's settings. Some clients set no limit, and a model that cannot stop would fill the context."""
    models = {"main": arguments.model} | ({"small": arguments.small} if arguments.small else {})
    tables = [
        f"[[models]]\nname = {json.dumps(name)}\nmodel = {json.dumps(model)}\nmax_tokens = 1024\n"
        for name, model in models.items()
    ]
    if arguments.end == "limit":
        tables.insert(0, f"max_request_s = {LIMIT_S}\n")
    (file := folder / "config.toml").write_text("".join(tables), encoding="utf-8")
    return file


def run_clients(arguments: argparse.Namespace) -> bool:
    """Install and run one client after the other. A client that fails does not keep the others from running."""
    clients = [client for client in CLIENTS if not arguments.client or client.launched in arguments.client]
    outcomes: list[Outcome] = []
    failed: list[tuple[str, str]] = []
    with server(arguments) as url:
        setting = _setting(arguments, url)
        try:
            for number, client in enumerate(clients, 1):
                _note(f"[{number}/{len(clients)}] {client.name} {client.version}")
                with _timed("installed"):
                    trouble = install(client, arguments.folder)
                if trouble is not None:
                    failed.append((client.name, f"it cannot be installed. {trouble}"))
                    _note(f"    {failed[-1][1]}")
                    continue
                outcomes.append(run_session(client, setting))
                _tell(outcomes[-1])
        finally:  # also of a run that was broken off
            _report(outcomes, failed, arguments)
    return not failed and not any(one.complaints for one in outcomes)


def _setting(arguments: argparse.Namespace, url: str) -> Setting:
    server = Remote(url)
    main = server.model()
    return Setting(
        folder=arguments.folder,
        url=url,
        model=main,
        small=server.beside(main),
        is_trimmed=arguments.trim,
        limit_s=arguments.limit_s or (_SCRIPTED_LIMIT_S if arguments.scripted else _LIMIT_S),
        is_scripted=arguments.scripted,
        end=arguments.end,
        sends_image=(arguments.image or arguments.scripted) and "images" in main.capabilities,
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    if (wall_s := time.monotonic() - started_s) > 1:
        _note(f"    {what} after {wall_s:.0f} s")


def _tell(one: Outcome) -> None:
    _note(f"    {len(one.seen)} requests in {one.wall_s:.1f} s; accepted: {one.verdict}")
    if one.complaints:
        _note(f"{one.client.name} said:\n{one.output[-2000:]}")


def _report(outcomes: list[Outcome], failed: list[tuple[str, str]], arguments: argparse.Namespace) -> None:
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([_facts(one) for one in outcomes], indent=1) + "\n", encoding="utf-8")
    others = [] if arguments.client else [(LAUNCHED[name].title, why) for name, why in NOT_RUN.items()]
    table = Table(*(Column(name, overflow="fold") for name in _COLUMNS), box=box.MARKDOWN)
    for one in outcomes:
        table.add_row(*_row(one))
    for name, why in [*failed, *others]:
        table.add_row(name, *[""] * 7, f"not run: {why}")
    markdown.output(_WIDTH).print(table)


def _row(one: Outcome) -> tuple[str, ...]:
    return (
        one.client.name,
        one.client.version,
        str(len(one.seen)),
        ", ".join(f"{name} {number}" for name, number in (one.by_model or {}).items() if number),
        f"{one.num_calls}{', the right ones' if one.is_right else ''}",
        "it came" if one.has_image else "it did not come" if one.sends_image else "",
        f"{one.wall_s:.1f}",
        ", ".join(one.elsewhere) or "nothing",
        one.verdict,
    )


def _facts(one: Outcome) -> dict[str, object]:
    requests = [
        {"at_s": round(each.at_s, 2), "method": each.method, "path": each.path, "status": each.status,
         "end": each.end, "body": each.body}
        for each in one.seen
    ]  # fmt: skip
    return {
        "client": one.client.spec,
        "exit_code": one.exit_code,
        "is_right": one.is_right,
        "complaints": one.complaints,
        "wall_s": round(one.wall_s, 1),
        "elsewhere": one.elsewhere,
        "by_model": one.by_model,
        "num_loads": one.num_loads,
        "has_image": one.has_image,
        "output": one.output,
        "cancelled": one.cancelled,
        "requests": requests,
    }


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the client end too
    try:
        arguments = parse_arguments(sys.argv[1:])
        sys.exit(0 if run_clients(arguments) else 1)
    except (BenchmarkError, CommandFailed, OSError, httpx.HTTPError) as error:
        sys.exit(f"scripts/accept-clients: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
