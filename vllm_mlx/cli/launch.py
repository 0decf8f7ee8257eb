"""`vllm-mlx launch CLIENT`: asks the server for its model, sets the client up, and becomes the client.

If no server runs, it starts one for as long as the client runs.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from .clients import CLIENTS, NO_KEY, Client, Target, roles_of, write_own
from .own_server import model_to_start, own_server, run_client, served_name
from .remote import KeyOption, NoServer, Remote, StartOption, UrlOption, find_server
from .terminal import TABLE, CommandFailed, WrongUsage, console, note, option, state_folder

_ANSWER_S = 5.0
_OTHER_MODEL = (
    "Leave out --model to use its model; or stop that server, and launch starts another; or set another port with "
    "VLLM_MLX_PORT."
)
_OTHER_PROGRAM = "If another program holds the port, stop it, or set another port with VLLM_MLX_PORT."


def _clients() -> list[tuple[str, str]]:
    """Return the clients, each with its title, for the Tab key."""
    return [(name, row.title) for name, row in CLIENTS.items()]


def launch(
    client: Annotated[
        str | None,
        typer.Argument(
            metavar="[CLIENT]",
            show_default=False,
            autocompletion=_clients,
            help=f"One of {', '.join(CLIENTS)}. Default: list them, and say how to install each.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", show_default=False, help="Arguments for the client."),
    ] = None,
    print_only: Annotated[
        bool, option("--print", None, "Print the steps as a shell script instead of taking them.")
    ] = False,
    model: StartOption = None,
    context: Annotated[
        int | None,
        option(
            "--context",
            "TOKENS",
            "Longest prompt and reply together. Default: the context that the server reports.",
            min=1024,
        ),
    ] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Start a coding agent on the served model. If no server runs, start one too, with `--model`.

    The agent's own settings stay as they are.
    """
    if client is None:
        if print_only or model or context or url or api_key:
            raise WrongUsage("Name a client. `vllm-mlx launch` alone lists them.")
        console().print(_table())
        return
    if client not in CLIENTS:
        raise WrongUsage(f"{client} is not a known client. Choose one of {', '.join(CLIENTS)}.")
    row = CLIENTS[client]
    if not row.program and (not row.files or not print_only):
        raise CommandFailed(_by_hand(client, row))
    server = find_server(url, api_key)
    try:
        target = _target(server, model, context, is_own=url is None)
    except NoServer as error:
        if url is not None or print_only:
            raise
        sys.exit(_run_with_server(row, server, model_to_start(model, error, "launch"), context, arguments or ()))
    if print_only:
        facts = f"{row.title} with {target.model.name} at {target.url}", _small(row, target)
        title = "; ".join(filter(None, facts))
        prepared = row.for_server(target)
        if prepared.program:
            print(prepared.script(title, arguments or ()), end="")
            return
        for text in (f"{title}.", prepared.next_step):
            note(text)
        print("".join(prepared.files.values()).lstrip("\n"), end="")
    else:
        program = _program(row)
        command, environment = _prepared(row, target, program, arguments or ())
        os.execve(program, command, environment)  # this process becomes the client


def _run_with_server(row: Client, server: Remote, model: str, context: int | None, arguments: Sequence[str]) -> int:
    """Start a server of `model`, and the client with it. Returns the client's exit code."""
    program = _program(row)
    with own_server(server, model, "launch"):
        target = _target(server, None, context, is_own=True)
        command, environment = _prepared(row, target, program, arguments)
        return run_client(command, program, environment)


def _target(server: Remote, name: str | None, context: int | None, *, is_own: bool) -> Target:
    """Ask the server for its model. `is_own`: the server is the one of this machine's settings, and may be replaced."""
    asked = replace(server, answer_s=_ANSWER_S)
    try:
        model = asked.chat_model(served_name(name) if is_own else name)
    except NoServer:
        raise
    except CommandFailed as error:
        if not is_own:
            raise
        advice = _OTHER_MODEL if isinstance(error, WrongUsage) else _OTHER_PROGRAM
        raise type(error)(f"{error.message} {advice}") from error
    context = context or model.max_model_len
    if context is None:
        raise WrongUsage(f"{server.url} does not say how long its context is: give the length with --context.")
    models = asked.models()
    is_one = len({each.checkpoint for each in models if each.writes}) <= 1
    small = asked.beside(model) or (None if is_one else model)
    return Target(
        url=server.url,
        model=model,
        context=context,
        small=small,
        roles=roles_of(models),
        api_key=server.api_key or NO_KEY,
        folder=state_folder() / "launch",
    )


def _small(client: Client, target: Target) -> str:
    """Name the model for the client's small tasks; the text is empty if they have no separate model."""
    tasks = "titles, summaries and other small tasks go to"
    return f"{tasks} {target.small.name}" if client.has_small_roles and target.small else ""


def _warn(client: Client, target: Target) -> None:
    if small := _small(client, target):
        note(f"{small}.")
    advice = "Serve a model with a longer one, or raise --max-model-len."
    if target.context < client.least_context:
        note(
            f"{client.title} needs a context of at least {client.least_context:,} tokens, and this one has "
            f"{target.context:,}. {advice}"
        )
    elif target.context - target.max_reply < client.first_prompt:
        note(
            f"{client.title}'s first prompt alone has about {client.first_prompt:,} tokens, and the context has "
            f"{target.context:,}. {advice}"
        )
    if client.key_warning:
        note(client.key_warning)


def _table() -> Table:
    """List the clients, and for each whether it is installed, or a remedy."""
    table = Table("Name", "Client", Column("Start it with `vllm-mlx launch NAME`", overflow="fold"), **TABLE)
    for name, row in CLIENTS.items():
        state = "installed" if shutil.which(row.program) else row.install
        by_hand = f"--print shows its entry; {row.install}" if row.files else f"by hand: docs/clients/{name}.md"
        table.add_row(name, row.title, state if row.program else by_hand)
    return table


def _by_hand(name: str, row: Client) -> str:
    """Describe the set-up of a client that cannot be started."""
    if row.files:
        return (
            f"launch cannot start {row.title}, which takes its models from its own settings only: --print prints the "
            "entry to copy."
        )
    return f"launch cannot set up {row.title}. {row.next_step} docs/clients/{name}.md says more."


def _program(row: Client) -> str:
    """Return the path of the client's program. Raises CommandFailed, which says how to install it."""
    program = shutil.which(row.program)
    if program is None:
        raise CommandFailed(
            f"{row.title} is not installed: `{row.program}` is not found. Install it with `{row.install}`, or use "
            "--print for a client on another machine."
        )
    return program


def _prepared(row: Client, target: Target, program: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Warn, write the client's files and sign it in. Returns its command and its environment."""
    client = row.for_server(target)
    _warn(client, target)
    for path, text in client.files.items():
        write_own(Path(path), text)
    kept = {name: value for name, value in os.environ.items() if name not in client.unset}
    environment = {**kept, **client.environment}
    *before, command = client.runs(arguments)
    for run in before:
        result = subprocess.run([program, *run[1:]], env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            lines = (result.stderr or result.stdout).strip().splitlines()
            raise CommandFailed(f"{client.title} refused its settings: {lines[-1] if lines else 'it does not say why'}")
    return command, environment
