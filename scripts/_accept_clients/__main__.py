"""The command behind scripts/accept-clients. Its exit code says whether every client was content."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console

from scripts._bench.client import BenchmarkError
from scripts._bench.servers import free_port, running

from .clients import CLIENTS, Client
from .faults import FAULTS, Fault
from .install import AcceptError, install
from .packages import MODELS, PACKAGES
from .report import print_faults, print_samples, print_sessions
from .samples import install_package, programs_of, python_of, run_sample
from .session import COMMANDS, Outcome, Setting, run_session

_ROOT = Path(__file__).parents[2]
_WIDTH = 200


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/accept-clients",
        description="Installs coding agents with npm and pip and runs a session of each against the server, with a "
        "home directory that is thrown away, a clean environment, and no way to anything but this machine.",
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
    add("--limit-s", type=float, default=900, metavar="S", help="end a session after so long (default 900)")
    add("--folder", type=Path, default=_ROOT / ".clients", help="where clients are installed (default: .clients)")
    add("--json", type=Path, metavar="FILE", help="write every request that was seen there")
    return parser.parse_args()


@contextlib.contextmanager
def server(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.url is not None:
        yield arguments.url.rstrip("/").removesuffix("/v1")
        return
    port = free_port()
    if arguments.scripted:
        command = [sys.executable, "-m", "tests.server.scripted", str(port), *COMMANDS]
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
    notes = Console(stderr=True, soft_wrap=True)
    packages = [one for one in PACKAGES if not arguments.package or one.name in arguments.package]
    ran = []
    left_out = [
        (package.name, f"block {number}: {why}")
        for package in packages
        for number, why in package.samples.items()
        if isinstance(why, str)
    ]
    with server(arguments) as url:
        for package in packages:
            notes.print(package.spec, highlight=False)
            if (trouble := install_package(package, arguments.folder)) is not None:
                left_out.append((package.name, f"it cannot be installed: {trouble}"))
                continue
            for program in programs_of(package, arguments.folder):
                ran.append(run_sample(program, python_of(package, arguments.folder), url, arguments.limit_s))
                if not ran[-1].is_accepted:
                    notes.print(f"{program.sample} said:\n{ran[-1].output[-1500:]}", markup=False, highlight=False)
    print_samples(ran, left_out, Console(width=None if sys.stdout.isatty() else _WIDTH))
    return all(one.is_accepted for one in ran)


def run(arguments: argparse.Namespace) -> bool:
    notes = Console(stderr=True, soft_wrap=True)
    output = Console(width=None if sys.stdout.isatty() else _WIDTH)
    clients = [client for client in CLIENTS if not arguments.client or client.launched in arguments.client]
    notes.print(
        f"Installing {', '.join(dict.fromkeys(client.spec for client in clients))} into {arguments.folder}",
        highlight=False,
    )
    failed = install(clients, arguments.folder)
    for client, why in failed:
        notes.print(f"{client.spec} cannot be installed: {why}", markup=False, highlight=False)
    clients = [client for client in clients if client not in [one for one, _ in failed]]
    with server(arguments) as url:
        [card, *_] = httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status().json()["data"]
        setting = Setting(
            arguments.folder,
            url,
            card["id"],
            card["max_model_len"],
            arguments.trim,
            arguments.limit_s,
            len(COMMANDS) if arguments.scripted else 1,
        )
        outcomes = []
        for client, fault in _sessions(clients, arguments):
            notes.print(f"{client.name}{f': {fault.name}' if fault else ''}", highlight=False)
            outcomes.append(run_session(client, setting, fault))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([_facts(one) for one in outcomes], indent=1) + "\n", encoding="utf-8")
    (print_faults if arguments.faults or arguments.fault else print_sessions)(outcomes, output)
    for one in outcomes:
        if one.fault is None and not one.is_accepted:
            notes.print(f"{one.client.name} said:\n{one.output[-2000:]}", markup=False, highlight=False)
    return all(one.is_accepted for one in outcomes if one.fault is None)


def _sessions(clients: list[Client], arguments: argparse.Namespace) -> Iterator[tuple[Client, Fault | None]]:
    if not (arguments.faults or arguments.fault):
        yield from ((client, None) for client in clients)
        return
    for fault in FAULTS:
        if not arguments.fault or fault.name in arguments.fault:
            yield from ((client, fault) for client in clients)


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
        "wall_s": round(one.wall_s, 1),
        "elsewhere": one.elsewhere,
        "output": one.output,
        "requests": requests,
    }


def main() -> None:
    try:
        arguments = parse_arguments()
        done = run_packages(arguments) if _takes_packages(arguments) else run(arguments)
        sys.exit(0 if done else 1)
    except (AcceptError, BenchmarkError, OSError, httpx.HTTPError) as error:
        sys.exit(f"scripts/accept-clients: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
