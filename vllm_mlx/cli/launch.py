"""`vllm-mlx launch CLIENT`: asks the server what it serves, sets the client up and becomes it."""

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

from .clients import CLIENTS, NO_KEY, JsonEntries, Lasting, OwnFile, Plan, Target, TextLines, pretty
from .remote import KeyOption, ModelOption, Remote, UrlOption, find_server
from .terminal import CommandFailed, WrongUsage, option

_CURSOR = "cursor"


def launch(
    client: Annotated[str, typer.Argument(metavar="|".join([*CLIENTS, _CURSOR]), show_default=False)],
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
    """Start a coding agent on this server's model. Its own settings stay as they are, without `--write`."""
    if client not in CLIENTS and client != _CURSOR:
        raise WrongUsage(f"{client} is not a known client. Choose one of {', '.join([*CLIENTS, _CURSOR])}.")
    server = find_server(url, api_key)
    if client == _CURSOR:
        _explain_cursor(server, model, print_only)
        return
    target = _target(server, model, context)
    plan = CLIENTS[client](target)
    *before, last = plan.commands
    plan = replace(plan, commands=(*before, (*last, *(arguments or ()))))
    if print_only:
        print(plan.script(f"{plan.title} with {target.model} at {target.url}"), end="")
    elif write:
        _write(plan)
    else:
        _warn(plan, target)
        _start(plan)


def _target(server: Remote, name: str | None, context: int | None) -> Target:
    model = server.model(name)
    context = context or model.max_model_len
    if context is None:
        raise WrongUsage(f"{server.url} does not say how long its context is: give the length with --context.")
    folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "vllm-mlx" / "launch"
    return Target(url=server.url, model=model.name, context=context, api_key=server.api_key or NO_KEY, folder=folder)


def _warn(plan: Plan, target: Target) -> None:
    if target.context - target.max_reply < plan.first_prompt:
        print(
            f"vllm-mlx: {plan.title}'s first prompt alone has about {plan.first_prompt:,} tokens, and the context "
            f"is {target.context:,}: serve a model with a longer one, or raise --max-model-len.",
            file=sys.stderr,
        )
    if plan.warning:
        print(f"vllm-mlx: {plan.warning}", file=sys.stderr)


def _write(plan: Plan) -> None:
    if plan.lasting is None:
        raise CommandFailed(
            f"{plan.title} has no settings file that can be written: start it with launch, or see --print."
        )
    print(write_lasting(plan.lasting))
    if plan.start_after_writing:
        print(f"Start it with `{plan.start_after_writing}`.")


def _start(plan: Plan) -> None:
    """Does not return: this process becomes the client."""
    name = plan.commands[-1][0]
    program = shutil.which(name)
    if program is None:
        raise CommandFailed(
            f"{plan.title} is not installed: `{name}` is not found. Install it with `{plan.install}`, or use --print "
            "for a client on another machine."
        )
    for path, text in plan.files.items():
        write_own(path, text)
    environment = {name: value for name, value in os.environ.items() if name not in plan.unset} | dict(plan.environment)
    for command in plan.commands[:-1]:
        result = subprocess.run([program, *command[1:]], env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            lines = (result.stderr or result.stdout).strip().splitlines()
            raise CommandFailed(f"{plan.title} refused its settings: {lines[-1] if lines else 'it does not say why'}")
    os.execve(program, plan.commands[-1], environment)


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
    """Replace a file at once. Only its owner may read it, because it may hold a key. Raises CommandFailed."""
    path = path.resolve()  # a link stays a link
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:  # mode 600
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        raise CommandFailed(f"Cannot write {path}: {error.strerror}.") from error


def write_lasting(entries: Lasting) -> str:
    """Write a client's settings, and keep the user's file beside it. Returns what was done. Raises CommandFailed."""
    path = entries.path
    old = _read(path)
    text = _new(old, entries)
    if text == old:
        return f"{path} needs no change."
    backup = path.with_name(path.name + ".before-vllm-mlx")
    if old and not backup.exists() and not isinstance(entries, OwnFile):
        write_own(backup, old)
    write_own(path, text)
    return f"Wrote {path}" + (f"; the file before the first change is {backup.name}." if backup.exists() else ".")


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
                raise CommandFailed(f"{entries.path} is not from vllm-mlx, so it is left alone: see --print.")
            return _OURS + entries.text


def _merged(path: Path, old: str, entries: JsonEntries) -> str:
    try:
        held = json.loads(old) if old.strip() else {}
    except ValueError as error:
        raise CommandFailed(f"{path} is not plain JSON ({error}), so it is left alone: see --print.") from error
    if not isinstance(held, dict):
        raise CommandFailed(f"{path} does not hold a JSON object, so it is left alone: see --print.")
    return pretty(_merge(held, dict(entries.values)))


def _merge(held: Any, new: Any) -> Any:
    """`new` wins, object by object. In a list it comes first, and replaces the entry with the same `id`."""
    if isinstance(held, dict) and isinstance(new, dict):
        return held | {key: _merge(held.get(key), value) for key, value in new.items()}
    if isinstance(held, list) and isinstance(new, list):
        return [*new, *(entry for entry in held if _identity(entry) not in [_identity(other) for other in new])]
    return new


def _identity(entry: Any) -> Any:
    return entry.get("id", entry) if isinstance(entry, dict) else entry


def _with_lines(old: str, entries: TextLines) -> str:
    """The file with our lines at its end, or in the place of our earlier lines."""
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
   tunnel's host name:
     export VLLM_MLX_API_KEY="$(openssl rand -hex 32)"
     vllm-mlx serve MODEL --served-model-name local --allowed-host YOUR-TUNNEL
3. Check that it works from outside:
     vllm-mlx status --once --url https://YOUR-TUNNEL --api-key "$VLLM_MLX_API_KEY"
{_settings("https://YOUR-TUNNEL", "local", "4")}"""


def _settings(url: str, model: str, number: str) -> str:
    return f"""{number}. In Cursor, under Settings, Models:
     API Keys, OpenAI API Key        the server's key
     Override OpenAI Base URL        {url}/v1
     Add custom model                {model}
   Then choose that model in the chat. Its Tab completion stays with Cursor's own models."""
