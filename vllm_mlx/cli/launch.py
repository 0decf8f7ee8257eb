"""`vllm-mlx launch CLIENT`: asks the server what it serves, sets the client up and becomes it.

If no server runs, it starts one for as long as the client runs.
"""

import ipaddress
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from .client_files import write_own, write_settings
from .client_table import CLIENTS
from .clients import NO_KEY, Client, Plan, Target
from .options import load_settings
from .own_server import own_server, run_client
from .remote import KeyOption, ModelOption, NoServer, Remote, UrlOption, find_server
from .settings import Settings
from .terminal import CommandFailed, WrongUsage, option

_CURSOR = "cursor"


_ANSWER_S = 5.0
_OTHER_MODEL = (
    "Leave out --model to use that one; or stop that server, and launch starts its own; or set another port with "
    "VLLM_MLX_PORT."
)
_OTHER_PROGRAM = "If another program holds the port, stop it, or set another port with VLLM_MLX_PORT."


def launch(
    client: Annotated[
        str, typer.Argument(metavar="CLIENT", show_default=False, help=f"One of {', '.join([*CLIENTS, _CURSOR])}.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", show_default=False, help="Arguments for the client."),
    ] = None,
    print_only: Annotated[bool, option("--print", None, "Print the steps as a shell script, and do nothing.")] = False,
    write: Annotated[
        bool, option("--write", None, "Write the client's own settings file, and do not start the client.")
    ] = False,
    model: ModelOption = None,
    context: Annotated[
        int | None,
        option("--context", "TOKENS", "Longest prompt and reply together. Default: what the server says.", min=1024),
    ] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Start a coding agent on this server's model, and the server with `--model` if none runs.

    The client's own settings stay as they are, without `--write`.
    """
    if client not in CLIENTS and client != _CURSOR:
        raise WrongUsage(f"{client} is not a known client. Choose one of {', '.join([*CLIENTS, _CURSOR])}.")
    server = find_server(url, api_key)
    if client == _CURSOR:
        _explain_cursor(server, model, print_only)
        return
    row = CLIENTS[client]
    try:
        target = _target(server, model, context, is_own=url is None)
    except NoServer as error:
        if url is not None or print_only or write:
            raise
        if (to_serve := _model_to_serve(model)) is None:
            raise CommandFailed(f"{error.message} Or name a model with --model, and launch starts a server.") from error
        sys.exit(_run_with_server(row, server, to_serve, context, arguments))
    plan = _plan(row, target, arguments)
    if print_only:
        print(plan.script(f"{plan.title} with {target.model} at {target.url}"), end="")
    elif write:
        _write(plan)
    else:
        program = _program(row)
        os.execve(program, plan.runs[-1], _prepared(plan, target, program))  # this process becomes the client


def _run_with_server(row: Client, server: Remote, model: str, context: int | None, arguments: list[str] | None) -> int:
    """Start a server of `model`, and the client with it. Returns the client's exit code."""
    program = _program(row)
    with own_server(server, model, _state_folder() / "server.log"):
        target = _target(server, None, context, is_own=True)
        plan = _plan(row, target, arguments)
        return run_client(plan.runs[-1], program, _prepared(plan, target, program))


def _state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "vllm-mlx" / "launch"


def _target(server: Remote, name: str | None, context: int | None, *, is_own: bool) -> Target:
    """`is_own`: the server is the one of this machine's settings, and may be replaced."""
    try:
        model = replace(server, answer_s=_ANSWER_S).model(_served_name(name) if is_own else name)
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
    return Target(
        url=server.url,
        model=model.name,
        context=context,
        searches=model.searches,
        api_key=server.api_key or NO_KEY,
        folder=_state_folder(),
    )


def _served_name(model: str | None) -> str | None:
    """The name under which a checkpoint is served: a folder is served by its own name, without its path."""
    return None if model is None else Settings(model=model).served_model_names[0]


def _model_to_serve(name: str | None) -> str | None:
    """The model that was asked for, or the one of the settings of `serve`. None: there is none."""
    settings = load_settings({})
    return name or (settings.model if "model" in settings.model_fields_set else None)


def _plan(row: Client, target: Target, arguments: list[str] | None) -> Plan:
    plan = row.plan(target)
    return replace(plan, arguments=tuple(arguments)) if arguments else plan


def _warn(plan: Plan, target: Target) -> None:
    if target.context < plan.least_context:
        print(
            f"vllm-mlx: {plan.title} needs a context of at least {plan.least_context:,} tokens, and this one has "
            f"{target.context:,}: serve a model with a longer one, or raise --max-model-len.",
            file=sys.stderr,
        )
    elif target.context - target.max_reply < plan.first_prompt:
        print(
            f"vllm-mlx: {plan.title}'s first prompt alone has about {plan.first_prompt:,} tokens, and the context "
            f"is {target.context:,}: serve a model with a longer one, or raise --max-model-len.",
            file=sys.stderr,
        )
    if plan.warning:
        print(f"vllm-mlx: {plan.warning}", file=sys.stderr)


def _write(plan: Plan) -> None:
    if plan.settings is None:
        raise CommandFailed(
            f"{plan.title} has no settings file that can be written: start it with launch, or see --print."
        )
    print(write_settings(plan.settings))
    if plan.after_writing:
        print(plan.after_writing)


def _program(row: Client) -> str:
    if not row.program:
        raise CommandFailed(
            f"{row.title} takes its models from its own settings only: --write adds this one and keeps a copy of the "
            "file, and --print prints it."
        )
    program = shutil.which(row.program)
    if program is None:
        raise CommandFailed(
            f"{row.title} is not installed: `{row.program}` is not found. Install it with `{row.install}`, or use "
            "--print for a client on another machine."
        )
    return program


def _prepared(plan: Plan, target: Target, program: str) -> dict[str, str]:
    """Warn, write the client's files and sign it in. Returns its environment."""
    _warn(plan, target)
    for path, text in plan.files.items():
        write_own(path, text)
    environment = {name: value for name, value in os.environ.items() if name not in plan.unset} | dict(plan.environment)
    for command in plan.commands[:-1]:
        result = subprocess.run([program, *command[1:]], env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            lines = (result.stderr or result.stdout).strip().splitlines()
            raise CommandFailed(f"{plan.title} refused its settings: {lines[-1] if lines else 'it does not say why'}")
    return environment


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


_WHY = (
    "Cursor's own servers send its requests, so they cannot use an address of this machine or its network. "
    "The server has to be reachable from the internet over https, behind a key."
)


def is_public(url: str) -> bool:
    """Whether other machines can use this address. A name is assumed to be public unless it is a local one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" or host == "localhost" or host.endswith((".local", ".localhost")) or "." not in host:
        return False
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True


def steps(*, url: str, model: str, has_key: bool) -> str:
    """What the user has to do until Cursor uses this server."""
    if is_public(url) and has_key:
        return f"{_WHY}\n\n{_settings(url, model, '1')}"
    return f"""{_WHY}

1. Open a tunnel to the server, for instance with cloudflared or ngrok; both print an https address:
     cloudflared tunnel --url {url}
     ngrok http {urlsplit(url).port or 8000}
   Whoever knows that address and the key can use your server: close the tunnel when you are done.
2. Start the server again with a key, kept out of the command line, under a name without a slash, and allow the
   tunnel's host name. Cursor changes what it sends without notice: fields that the server does not know are left out
   and named in the log, instead of refused:
     export VLLM_MLX_API_KEY="$(openssl rand -hex 32)"
     vllm-mlx serve MODEL --served-model-name local --allowed-host YOUR-TUNNEL --unknown-fields warn
3. Check that it works from outside:
     vllm-mlx status --once --url https://YOUR-TUNNEL --api-key "$VLLM_MLX_API_KEY"
{_settings("https://YOUR-TUNNEL", "local", "4")}"""


def _settings(url: str, model: str, number: str) -> str:
    return f"""{number}. In Cursor, under Settings, Models:
     API Keys, OpenAI API Key        the server's key
     Override OpenAI Base URL        {url}/v1
     Add custom model                {model}
   Then choose that model in the chat. Its Tab completion stays with Cursor's own models."""
