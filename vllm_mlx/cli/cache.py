"""`vllm-mlx cache`: the prefix cache on this machine's disk, and in the memory of a running server."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from ..core.memory import readable
from ..disk.database import clear_kept
from ..disk.faults import Damaged, FolderUnusable, InUse, NoRoom
from ..disk.folder import Folder, Listing, look
from ..disk.folder import verify as verified
from ..disk.place import folder_of, nothing_in
from .options import load_settings, server_settings
from .remote import KeyOption, NoServer, Remote, UrlOption, find_server
from .status import disk_line, held_line
from .terminal import (
    TABLE,
    AsJson,
    CommandFailed,
    ExitCode,
    WrongUsage,
    confirm,
    console,
    duration,
    number_columns,
    option,
)

_MAX_ENTRIES = 200
_DAY_S = 86_400
_NOTHING = "Nothing is kept on disk: {}. --cache-dir names another folder."

cache_app = typer.Typer(
    help="List, clear and verify the cache on disk, or list the cache in a server's memory.", no_args_is_help=True
)
FolderOption = Annotated[str | None, option("--cache-dir", "DIR", "The folder. Default: as `serve` is set.")]


@cache_app.command(name="list")
def list_kept(as_json: AsJson = False, cache_dir: FolderOption = None) -> None:
    """Print the cached state on disk, by model and salt. A server may use the folder."""
    root = _root(cache_dir)
    with _explained():
        nothing, found = nothing_in(root), look(root)
    kept = _by_salt(found)
    if as_json:
        print(json.dumps({"folder": str(root), "damaged": len(found.reasons), "kept": kept}, indent=2))
        return
    if nothing is not None:
        print(_NOTHING.format(nothing))
        return
    screen = console()
    screen.print(_table(kept))
    num_bytes, num_records = (sum(group[key] for group in kept) for key in ("bytes", "records"))
    screen.print(f"{root}: {readable(num_bytes)} in {num_records:,} records.", markup=False)
    if found.reasons:
        screen.print(f"{len(found.reasons):,} records are damaged: `vllm-mlx cache verify` names them.", markup=False)


def _by_salt(found: Listing) -> list[dict[str, Any]]:
    """Return the sums for each checkpoint and salt, those used last first."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for record in found.records:
        header = record.header
        names = {"model": _model(found.models, header.fingerprint), "salt": header.salt}
        empty = {"records": 0, "tokens": 0, "bytes": 0, "used": 0.0}
        group = groups.setdefault((header.fingerprint, header.salt), {**names, **empty})
        group["records"] += 1
        group["tokens"] += header.end - header.start
        group["bytes"] += record.file_bytes
        group["used"] = max(group["used"], record.used_s)
    return sorted(groups.values(), key=lambda group: -group["used"])


def _table(listed: list[dict[str, Any]]) -> Table:
    table = Table(Column("Model", overflow="fold"), *number_columns("Records", "Tokens", "Size", "Last used"), **TABLE)
    for group in listed[:_MAX_ENTRIES]:
        name = group["model"] + (f"\n  salt {group['salt']}" if group["salt"] else "")
        numbers = (f"{group['records']:,}", f"{group['tokens']:,}", readable(group["bytes"]))
        table.add_row(Text(name), *numbers, f"{_age(max(0.0, time.time() - group['used']))} ago")
    return table


@cache_app.command()
def clear(
    salt: Annotated[str | None, option("--salt", "TEXT", "Only what belongs to salts that begin so.")] = None,
    model: Annotated[str | None, option("--model", "TEXT", "Only what belongs to this model.")] = None,
    yes: Annotated[bool, option("--yes", None, "Remove it without a question.")] = False,
    as_json: AsJson = False,
    cache_dir: FolderOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Clear the cache on disk: state, remembered replies and stored responses.

    A server that uses the folder also clears its memory, and keeps stored responses; its running replies continue.
    """
    if "" in (salt, model):
        raise WrongUsage("--salt and --model need a text: leave them out to clear everything.")
    root = None if url is not None else _folder(cache_dir)
    words = "".join(f" of {name} {text}" for name, text in (("salts like", salt), ("the model", model)) if text)
    confirm(f"The cached state{words} in {root or url} will be removed.", is_sure=yes)
    with _opened(root) as (folder, why):
        if folder is not None:
            num_records, freed = _clear_here(folder, salt or "", model)
        else:
            num_records, freed = None, _clear_there(root, find_server(url, api_key, as_admin=True), salt, model, why)
    if as_json:
        print(json.dumps({"removed_records": num_records, "freed_bytes": freed}, indent=2))
    else:
        print(f"{'' if num_records is None else f'{num_records:,} records were removed, '}{readable(freed)} freed.")


def _clear_here(folder: Folder, salt: str, model: str | None) -> tuple[int, int]:
    models = look(folder.root).models
    chosen = [
        record
        for record in folder.scan()
        if record.header.salt.startswith(salt) and model in (None, _model(models, record.header.fingerprint))
    ]
    folder.remove(chosen)
    if model is None:
        folder.database.run(lambda connection: clear_kept(connection, salt))
    folder.database.shorten()
    return len(chosen), sum(record.file_bytes for record in chosen)


def _clear_there(root: Path | None, server: Remote, salt: str | None, model: str | None, why: str) -> int:
    """Ask the server that owns the folder. Returns the bytes."""
    if model is not None:
        raise WrongUsage(f"{why} Stop it first: --model needs a folder that no server uses.".strip())
    try:
        disk = server.status()["cache"].get("disk") or {} if root is not None else {}
    except NoServer as error:
        raise CommandFailed(f"{why} No server answers at {server.url}: give its address with --url.") from error
    if root is not None and disk.get("folder") != str(root):
        raise CommandFailed(f"{why} The server at {server.url} is another one: give its address with --url.")
    query = "" if salt is None else f"?{urlencode({'salt': salt})}"
    return int(server.ask(f"/v1/cache{query}", "DELETE")["freed_bytes"])


@cache_app.command()
def verify(as_json: AsJson = False, cache_dir: FolderOption = None) -> None:
    """Read every byte of the cache on disk, and remove damaged records. If a server runs, damage is only named."""
    root, started_s = _folder(cache_dir), time.monotonic()
    with _opened(root) as (folder, _):
        num_records, num_bytes, faults = verified(root, folder)
    if as_json:
        listed = [{"file": str(path), "fault": fault} for path, fault in faults.items()]
        print(json.dumps({"records": num_records, "bytes": num_bytes, "damaged": listed}, indent=2))
    else:
        took = duration(time.monotonic() - started_s)
        print(f"{num_records:,} records, {readable(num_bytes)}, read in {took}.")
        for path, fault in faults.items():
            print(f"{path} {'is damaged' if folder is None else 'was damaged and is removed'}: {fault}.")
        if not faults:
            print("Every byte is as it was written.")
    if faults:
        sys.exit(ExitCode.FAILED)


@cache_app.command()
def memory(as_json: AsJson = False, url: UrlOption = None, api_key: KeyOption = None) -> None:
    """Print the prefix cache in the memory of a running server."""
    server = find_server(url, api_key, as_admin=True)
    server.status()  # or another program answers
    held = server.ask("/v1/cache")
    if as_json:
        print(json.dumps(held, indent=2))
    else:
        console().print(cache_tree(held["data"], held["cache"], held["others"]))


def _root(cache_dir: str | None) -> Path:
    settings = server_settings() if cache_dir is None else load_settings({"cache_dir": cache_dir})
    keeps = {"cache_disk": settings.cache_disk or None, "prefix_cache": True, "repeatable": False}
    return folder_of(settings.model_copy(update=keeps).engine_config().cache_dir)  # also where nothing more is kept


def _folder(cache_dir: str | None) -> Path:
    """Return the folder. Raises CommandFailed if it holds no cache."""
    root = _root(cache_dir)
    with _explained():
        if (nothing := nothing_in(root)) is not None:
            raise CommandFailed(_NOTHING.format(nothing))
    return root


@contextmanager
def _opened(root: Path | None) -> Iterator[tuple[Folder | None, str]]:
    """Open the folder. Yields None and the reason if a server owns it."""
    folder, why = None, ""
    with _explained():
        try:
            if root is not None:
                folder = Folder(root, max_bytes=sys.maxsize, daily_bytes=sys.maxsize, floor_bytes=0)
        except InUse as error:
            why = error.fact
        try:
            yield folder, why
        finally:
            if folder is not None:
                folder.close()


@contextmanager
def _explained() -> Iterator[None]:
    """Raise errors of the folder and of the system as CommandFailed."""
    try:
        yield
    except (FolderUnusable, NoRoom, Damaged) as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"{error.filename or 'The disk'}: {error.strerror or error}.") from error


def _model(models: Mapping[str, str], fingerprint: str) -> str:
    return models.get(fingerprint) or f"checkpoint {fingerprint[:8]}"


def _age(seconds: float) -> str:
    return f"{seconds / _DAY_S:.0f} days" if seconds >= 2 * _DAY_S else duration(seconds)


def cache_tree(entries: list[dict[str, Any]], counts: dict[str, Any], others: dict[str, int]) -> Tree:
    """Return runs of tokens, each below the run that it continues, so that a shared beginning occurs once.

    `others`: a sum of the runs of other API keys.
    """
    if not counts.get("enabled"):
        return Tree("The prefix cache is off.")
    root = Tree(
        f"{counts.get('entry_count', 0)} conversations, {held_line(counts)}; "
        f"{counts.get('hits', 0)} hits, {counts.get('misses', 0)} misses, "
        f"{counts.get('tokens_saved', 0):,} tokens not computed again"
    )
    if "disk" in counts:
        root.label = f"{root.label}\nOn disk: {disk_line(counts['disk'])}"
    branches: dict[Any, Tree] = {None: root}
    known = {entry["node_id"] for entry in entries}
    # A parent begins before its children do.
    for entry in sorted(entries, key=itemgetter("start", "node_id"))[:_MAX_ENTRIES]:
        parent = entry["parent_id"] if entry["parent_id"] in known else None
        branches[entry["node_id"]] = branches.get(parent, root).add(_entry(entry))
    if len(entries) > _MAX_ENTRIES:
        root.add(f"and {len(entries) - _MAX_ENTRIES} more: see --json")
    if others["num_entries"]:
        root.add(f"{others['num_tokens']:,} tokens of other keys  {readable(others['num_bytes'])}")
    return root


def _entry(entry: dict[str, Any]) -> str:
    num_bytes = entry["segment_bytes"] + entry["state_bytes"]
    state = ", a snapshot" if entry["state_bytes"] else ""
    salted = ", salted" if entry.get("salted") else ""
    return f"tokens {entry['start']:,}–{entry['end']:,}  {readable(num_bytes)}{state}, {entry['hits']} hits{salted}"
