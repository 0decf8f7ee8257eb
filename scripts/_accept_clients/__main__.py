"""The command behind scripts/accept-clients. Its exit code says whether every client was content."""

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from rich.console import Console

from scripts._bench.client import BenchmarkError
from scripts._bench.servers import free_port, running
from vllm_mlx.cli.client_table import CLIENTS as LAUNCHED

from .clients import CLIENTS, NOT_RUN
from .faults import FAULTS
from .install import install
from .packages import MODELS, PACKAGES
from .report import print_faults, print_samples, print_sessions, verdict
from .samples import Ran, install_package, programs_of, python_of, run_sample
from .session import SCRIPTED_COMMANDS, Outcome, Setting, run_session

_ROOT = Path(__file__).parents[2]
_WIDTH = 200
_LIMIT_S = 900.0  # a model on a CPU takes minutes to read a client's prompt
_SCRIPTED_LIMIT_S = 180.0


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/accept-clients",
        description="Installs coding agents with npm and pip and runs a session of each against the server, with a "
        "home directory that is thrown away, a clean environment, and no way to anything but this machine. Ends with 1 "
        "where one could not be installed or was not content.",
    )
    add = parser.add_argument
    add("--url", help="a running server; without it, one is started")
    add("--scripted", action="store_true", help="start a server without a model, which calls the shell twice and ends")
    add("--model", default="demo", metavar="M", help="checkpoint to start a server with (default: the bundled demo)")
    add(
        "--client",
        action="append",
        choices=list(dict.fromkeys(client.launched for client in CLIENTS)),
        help="this one only; may repeat",
    )
    add("--packages", action="store_true", help="run the samples of client packages' READMEs instead")
    add("--package", action="append", metavar="NAME", choices=[one.name for one in PACKAGES], help="this one only")
    add("--faults", action="store_true", help="run the faults instead: what each client does about each of them")
    add("--fault", action="append", metavar="NAME", choices=[fault.name for fault in FAULTS], help="this fault only")
    add("--trim", action="store_true", help="fewest tools, so that prompts are short")
    add("--limit-s", type=float, metavar="S", help="end a session after so long (default 900; with --scripted 180)")
    add("--folder", type=Path, default=_ROOT / ".clients", help="where clients are installed (default: .clients)")
    add("--json", type=Path, metavar="FILE", help="write every request that was seen there")
    return parser.parse_args(words)


@contextlib.contextmanager
def server(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.url is not None:
        yield arguments.url.rstrip("/").removesuffix("/v1")
        return
    port = free_port()
    if arguments.scripted:
        command = [sys.executable, "-m", "tests.server.scripted", str(port), *SCRIPTED_COMMANDS]
    else:
        # A model that cannot stop would go on up to the context: some clients set no limit.
        command = [
            sys.executable,
            "-m",
            "vllm_mlx",
            "serve",
            arguments.model,
            "--port",
            str(port),
            "--max-tokens",
            "128" if _takes_packages(arguments) else "1024",
            *(word for name in _names(arguments) for word in ("--served-model-name", name)),
        ]
    with running(command, port):
        yield f"http://127.0.0.1:{port}"


def _takes_packages(arguments: argparse.Namespace) -> bool:
    return bool(arguments.packages or arguments.package)


def _names(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The names of models that the samples ask for."""
    return MODELS if _takes_packages(arguments) else ()


def run_packages(arguments: argparse.Namespace) -> bool:
    packages = [one for one in PACKAGES if not arguments.package or one.name in arguments.package]
    ran: list[Ran] = []
    failed: list[tuple[str, str]] = []
    left_out = [
        (package.name, f"block {number}: {why}")
        for package in packages
        for number, why in package.samples.items()
        if isinstance(why, str)
    ]
    with server(arguments) as url:
        try:
            for number, package in enumerate(packages, 1):
                _note(f"[{number}/{len(packages)}] {package.spec}")
                with _timed("installed"):
                    trouble = install_package(package, arguments.folder)
                if trouble is not None:
                    failed.append((package.name, f"it cannot be installed. {trouble}"))
                    _note(f"    {failed[-1][1]}")
                    continue
                for program in programs_of(package, arguments.folder):
                    one = run_sample(program, python_of(package, arguments.folder), url, arguments.limit_s or _LIMIT_S)
                    ran.append(one)
                    _note(f"    {program.sample}: {one.wall_s:.1f} s; accepted: {'yes' if one.is_accepted else 'no'}")
                    if not one.is_accepted:
                        _note(f"{program.sample} said:\n{one.output[-1500:]}")
        finally:
            print_samples(ran, [*failed, *left_out], Console(width=None if sys.stdout.isatty() else _WIDTH))
    return not failed and all(one.is_accepted for one in ran)


def run_clients(arguments: argparse.Namespace) -> bool:
    """Install and run one client after the other. What one of them does wrong does not keep the others from running."""
    clients = [client for client in CLIENTS if not arguments.client or client.launched in arguments.client]
    faults = [fault for fault in FAULTS if arguments.faults or fault.name in (arguments.fault or ())]
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
                for fault in faults or (None,):
                    outcomes.append(run_session(client, setting, fault))
                    _tell(outcomes[-1])
        finally:  # also of a run that was broken off
            _report(outcomes, failed, arguments)
    return not failed and not any(one.complaints for one in outcomes if one.fault is None)


def _setting(arguments: argparse.Namespace, url: str) -> Setting:
    [card, *_] = httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status().json()["data"]
    return Setting(
        folder=arguments.folder,
        url=url,
        model=card["id"],
        window=card["max_model_len"],
        is_trimmed=arguments.trim,
        limit_s=arguments.limit_s or (_SCRIPTED_LIMIT_S if arguments.scripted else _LIMIT_S),
        is_scripted=arguments.scripted,
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
    name = f"{one.fault.name}: " if one.fault else ""
    _note(f"    {name}{len(one.seen)} requests in {one.wall_s:.1f} s; accepted: {verdict(one)}")
    if one.fault is None and one.complaints:
        _note(f"{one.client.name} said:\n{one.output[-2000:]}")


def _report(outcomes: list[Outcome], failed: list[tuple[str, str]], arguments: argparse.Namespace) -> None:
    output = Console(width=None if sys.stdout.isatty() else _WIDTH)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([_facts(one) for one in outcomes], indent=1) + "\n", encoding="utf-8")
    if arguments.faults or arguments.fault:
        order = [fault.name for fault in FAULTS]
        print_faults(sorted(outcomes, key=lambda one: order.index(one.fault.name if one.fault else "")), output)
        return
    others = [] if arguments.client else [(LAUNCHED[name].title, why) for name, why in NOT_RUN.items()]
    print_sessions(outcomes, [*failed, *others], output)


def _facts(one: Outcome) -> dict[str, object]:
    requests = [
        {"at_s": round(each.at_s, 2), "method": each.method, "path": each.path, "status": each.status,
         "retry_after": each.retry_after, "fault": each.fault, "end": each.end, "body": each.body}
        for each in one.seen
    ]  # fmt: skip
    return {
        "client": one.client.spec,
        "fault": one.fault.name if one.fault else None,
        "exit_code": one.exit_code,
        "is_right": one.is_right,
        "complaints": one.complaints,
        "wall_s": round(one.wall_s, 1),
        "elsewhere": one.elsewhere,
        "output": one.output,
        "requests": requests,
    }


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the client end too
    try:
        arguments = parse_arguments(sys.argv[1:])
        done = run_packages(arguments) if _takes_packages(arguments) else run_clients(arguments)
        sys.exit(0 if done else 1)
    except (BenchmarkError, OSError, httpx.HTTPError) as error:
        sys.exit(f"scripts/accept-clients: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
