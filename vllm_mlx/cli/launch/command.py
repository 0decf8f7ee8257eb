"""`vllm-mlx launch CLIENT`: asks the server what it serves and becomes the client, told of it. Talks HTTP alone."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..failures import CommandFailed, WrongUsage
from ..remote import KeyOption, Remote, UrlOption, find_server
from .clients import CLIENTS, Client
from .cursor import is_public, steps
from .files import write_lasting, write_own
from .plan import NO_KEY, Plan, Target

_CURSOR = "cursor"


def launch(
    client: Annotated[str, typer.Argument(metavar="|".join([*CLIENTS, _CURSOR]), show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", show_default=False, help="Handed on to the client."),
    ] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print what would be done, as a shell script, and do nothing.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write it into the client's own settings, and start nothing.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", metavar="TEXT", show_default=False, help="Default: the one served.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="TOKENS", min=1024, show_default=False, help="Default: what the server says."
        ),
    ] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Start a coding agent on this server's model. Its own settings stay as they are, without `--write`."""
    if client not in CLIENTS and client != _CURSOR:
        raise WrongUsage(f"{client} is no client that can be started. Choose one of {', '.join([*CLIENTS, _CURSOR])}.")
    server = find_server(url, api_key)
    if client == _CURSOR:
        _explain_cursor(server, model, print_only)
        return
    chosen = CLIENTS[client]
    target = _target(server, model, context)
    plan = chosen.plan(target, Path.home())
    plan = _with_arguments(plan, tuple(arguments or ()))
    if print_only:
        print(plan.script(f"{chosen.title} with {target.model} at {target.url}"), end="")
    elif write:
        _write(chosen, plan)
    else:
        _warn(chosen, plan, target)
        _start(chosen, plan)


def own_folder() -> Path:
    """Where files for clients lie that are none of their users' own."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "vllm-mlx" / "launch"


def _target(server: Remote, name: str | None, context: int | None) -> Target:
    model = server.model(name)
    context = context or model.max_model_len
    if context is None:
        raise WrongUsage(f"{server.url} does not say how long its context is: say it with --context.")
    return Target(
        url=server.url, model=model.name, context=context, api_key=server.api_key or NO_KEY, folder=own_folder()
    )


def _with_arguments(plan: Plan, arguments: tuple[str, ...]) -> Plan:
    *before, last = plan.commands
    return replace(plan, commands=(*before, (*last, *arguments)))


def _warn(client: Client, plan: Plan, target: Target) -> None:
    if target.context - target.max_reply < plan.first_prompt:
        print(
            f"vllm-mlx: {client.title}'s first prompt alone has about {plan.first_prompt:,} tokens, and the context "
            f"is {target.context:,}: serve a model with a longer one, or a longer --max-model-len.",
            file=sys.stderr,
        )
    if plan.warning:
        print(f"vllm-mlx: {plan.warning}", file=sys.stderr)


def _write(client: Client, plan: Plan) -> None:
    if plan.lasting is None:
        raise CommandFailed(
            f"{client.title} keeps no settings that can be written: start it with launch, or see --print."
        )
    print(write_lasting(plan.lasting))
    if client.title == "Codex":
        [variable] = plan.environment
        print(f"Start it with `{variable}=KEY codex --profile vllm-mlx`.")


def _start(client: Client, plan: Plan) -> None:
    """Does not return: this process becomes the client."""
    program = shutil.which(plan.commands[-1][0])
    if program is None:
        raise CommandFailed(f"{client.title} is not installed: `{plan.commands[-1][0]}` is not found. {_hint(client)}")
    for path, text in plan.files.items():
        write_own(path, text)
    environment = {name: value for name, value in os.environ.items() if name not in plan.unset} | plan.environment
    for command in plan.commands[:-1]:
        result = subprocess.run([program, *command[1:]], env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            said = (result.stderr or result.stdout).strip().splitlines()
            raise CommandFailed(f"{client.title} refused its settings: {said[-1] if said else 'it does not say why'}")
    os.execve(program, plan.commands[-1], environment)


def _hint(client: Client) -> str:
    return f"Install it with `{client.install}`, or see --print for what to tell one that runs elsewhere."


def _explain_cursor(server: Remote, model: str | None, print_only: bool) -> None:
    try:
        name = server.model(model).name
    except WrongUsage:
        raise
    except CommandFailed:
        name = model or "the name that /v1/models shows"
    print(steps(url=server.url, model=name, has_key=server.api_key is not None))
    if not print_only and not (is_public(server.url) and server.api_key):
        raise CommandFailed(f"Cursor cannot reach {server.url}: take the steps above, then give the tunnel as --url.")
