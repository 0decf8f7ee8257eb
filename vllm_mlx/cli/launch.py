"""`vllm-mlx launch CLIENT`: asks the server what it serves, configures the client and becomes it."""

import ipaddress
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from .clients import CLIENTS, NO_KEY, Client, JsonEntries, Lasting, OwnFile, Plan, Target, TextLines, pretty
from .remote import KeyOption, Remote, UrlOption, find_server
from .terminal import CommandFailed, WrongUsage

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
    environment = {name: value for name, value in os.environ.items() if name not in plan.unset} | dict(plan.environment)
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


_BEGIN, _END = "# vllm-mlx launch: begin\n", "# vllm-mlx launch: end\n"
_OURS = "# Written by vllm-mlx launch, which replaces it.\n"


def write_own(path: Path, text: str) -> None:
    """Write a file that only its owner may read, because it may hold a key, at once. Raises CommandFailed."""
    path = path.resolve()  # a link stays one
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:  # mode 600
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        raise CommandFailed(f"Cannot write {path}: {error.strerror}.") from error


def write_lasting(entries: Lasting) -> str:
    """The file as it was before the first time is left beside it. Says what was done. Raises CommandFailed."""
    path = entries.path
    old = _read(path)
    text = _new(old, entries)
    if text == old:
        return f"{path} says so already."
    backup = path.with_name(path.name + ".before-vllm-mlx")
    if old and not backup.exists() and not isinstance(entries, OwnFile):
        write_own(backup, old)
    write_own(path, text)
    return f"Wrote {path}" + (f"; as it was before, it is {backup.name}." if backup.exists() else ".")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"Cannot read {path}, so it is left alone: {type(error).__name__}.") from error


def _new(old: str, entries: Lasting) -> str:
    match entries:
        case JsonEntries():
            return _merged(entries.path, old, entries)
        case TextLines():
            return _with_lines(old, entries)
        case OwnFile():
            if old and not old.startswith(_OURS):
                raise CommandFailed(f"{entries.path} was written by somebody else, so it is left alone: see --print.")
            return _OURS + entries.text


def _merged(path: Path, old: str, entries: JsonEntries) -> str:
    try:
        held = json.loads(old) if old.strip() else {}
    except ValueError as error:
        raise CommandFailed(f"{path} is no plain JSON ({error}), so it is left alone: see --print.") from error
    if not isinstance(held, dict):
        raise CommandFailed(f"{path} holds no JSON object, so it is left alone: see --print.")
    return pretty(_merge(held, dict(entries.values)))


def _merge(held: Any, new: Any) -> Any:
    """`new` wins, object by object; it stands first in a list, in place of what has its `id`."""
    if isinstance(held, dict) and isinstance(new, dict):
        return held | {key: _merge(held.get(key), value) for key, value in new.items()}
    if isinstance(held, list) and isinstance(new, list):
        return [*new, *(entry for entry in held if _identity(entry) not in [_identity(other) for other in new])]
    return new


def _identity(entry: Any) -> Any:
    return entry.get("id", entry) if isinstance(entry, dict) else entry


def _with_lines(old: str, entries: TextLines) -> str:
    """At the end, or in the place of those of the last time."""
    before, begin, rest = old.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and not end:
        raise CommandFailed(f"{entries.path} lacks the line `{_END.strip()}`, so it is left alone: see --print.")
    if any(line.strip().startswith(entries.marker) for line in (before + after).splitlines()):
        raise CommandFailed(f"{entries.path} has a line `{entries.marker}` already, so it is left alone: see --print.")
    if not begin:
        before += "" if not old else "\n" if old.endswith("\n") else "\n\n"
    return before + _BEGIN + entries.text + _END + after


_WHY = (
    "Cursor's own servers send its requests, so an address of this machine or its network means nothing to them. "
    "The server has to be reachable from the internet over https, behind a key."
)


def is_public(url: str) -> bool:
    """Whether servers elsewhere can take it for an address. Names are believed unless they are of this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" or host == "localhost" or host.endswith((".local", ".localhost")) or "." not in host:
        return False
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True


def steps(*, url: str, model: str, has_key: bool) -> str:
    """What to do, up to the settings of Cursor."""
    if is_public(url) and has_key:
        return f"{_WHY}\n\n{_settings(url, model, '1')}"
    return f"""{_WHY}

1. Open a tunnel to the server, for instance with cloudflared or ngrok; both print an https address:
     cloudflared tunnel --url {url}
     ngrok http {urlsplit(url).port or 8000}
   Whoever knows that address and the key can use your server: close the tunnel when you are done.
2. Start the server again with a key, kept out of the command line, under a name without a slash, and let it go by
   the tunnel's name:
     export VLLM_MLX_API_KEY="$(openssl rand -hex 32)"
     vllm-mlx serve MODEL --served-model-name local --allowed-host YOUR-TUNNEL
3. Look whether it works from outside:
     vllm-mlx status --once --url https://YOUR-TUNNEL --api-key "$VLLM_MLX_API_KEY"
{_settings("https://YOUR-TUNNEL", "local", "4")}"""


def _settings(url: str, model: str, number: str) -> str:
    return f"""{number}. In Cursor, under Settings, Models:
     API Keys, OpenAI API Key        the server's key
     Override OpenAI Base URL        {url}/v1
     Add custom model                {model}
   Then choose that model in the chat. Its Tab completion stays with Cursor's own models."""
