"""`vllm-mlx cache`: what a running server's prefix cache holds, or what is kept on this machine's disk."""

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Annotated, Any

from rich.tree import Tree

from .remote import KeyOption, UrlOption, find_server
from .status import disk_line
from .terminal import AsJson, WrongUsage, console, option, readable

_MAX_ENTRIES = 200


def cache(
    clear: Annotated[
        bool, option("--clear", None, "Remove all cached state, on disk too. Running replies continue.")
    ] = False,
    as_json: AsJson = False,
    url: UrlOption = None,
    api_key: KeyOption = None,
    disk: Annotated[
        bool, option("--disk", None, "Look at the folder on this machine's disk; no server has to run.")
    ] = False,
    cache_dir: Annotated[
        str | None, option("--cache-dir", "DIR", "With --disk: the folder. Default: as `serve` is set.")
    ] = None,
    verify: Annotated[
        bool, option("--verify", None, "With --disk: read every byte, and remove damaged files.")
    ] = False,
    salt: Annotated[
        str | None, option("--salt", "TEXT", "With --disk --clear: only what belongs to salts that begin so.")
    ] = None,
    yes: Annotated[bool, option("--yes", None, "With --disk: remove files without a question.")] = False,
) -> None:
    """Print what the server's prefix cache holds, or clear it; with --disk, look after what is kept on disk."""
    given = [flag for flag, is_given in {"--verify": verify, "--clear": clear}.items() if is_given]
    details = {"--cache-dir": cache_dir is not None, "--salt": salt is not None, "--yes": yes}
    _check(disk, given, details, has_server=url is not None or api_key is not None)
    if salt == "":
        raise WrongUsage("--salt is empty, and every salt begins so: leave it out to clear everything.")
    if not disk:
        _of_server(url, api_key, clear=clear, as_json=as_json)
        return
    from . import disk as files  # here, because a running server needs none of it
    from . import disk_upkeep as upkeep

    if verify:
        upkeep.check(cache_dir, as_json=as_json)
    elif clear:
        upkeep.clear(files.Kept.open(cache_dir), salt, is_sure=yes, as_json=as_json)
    else:
        files.show(cache_dir, as_json=as_json)


def _check(disk: bool, actions: list[str], details: Mapping[str, bool], *, has_server: bool) -> None:
    """Raises WrongUsage for flags that mean nothing together."""
    extra = [flag for flag, is_given in details.items() if is_given]
    if not disk:
        for flag in (*(action for action in actions if action != "--clear"), *extra):
            raise WrongUsage(f"{flag} is about the files on disk: give it with --disk.")
        return
    if has_server:
        raise WrongUsage("--disk looks at files of this machine, --url and --api-key at a server: leave one out.")
    if len(actions) > 1:
        raise WrongUsage(f"{actions[0]} and {actions[1]} are two different things: give one at a time.")
    action = actions[0] if actions else "the list"
    for flag in extra:
        if flag in ("--salt", "--yes") and action != "--clear":
            raise WrongUsage(f"{flag} belongs to --clear.")


def _of_server(url: str | None, api_key: str | None, *, clear: bool, as_json: bool) -> None:
    server = find_server(url, api_key, as_admin=True)
    held = server.delete("/v1/cache") if clear else server.get("/v1/cache")
    if as_json:
        print(json.dumps(held, indent=2))
    elif clear:
        print(f"The cache is empty: {readable(int(held['freed_bytes']))} were freed.")
    else:
        console().print(cache_tree(held["data"], held["cache"], held["others"]))


def cache_tree(entries: list[dict[str, Any]], counts: dict[str, Any], others: dict[str, int]) -> Tree:
    """Runs of tokens, each below the run that it continues, so that a shared beginning occurs once.

    `others`: a sum of the runs of other API keys.
    """
    if not counts.get("enabled"):
        return Tree("The prefix cache is off.")
    root = Tree(
        f"{counts.get('entry_count', 0)} conversations, {counts.get('current_memory_mb', 0):,.1f} of "
        f"{counts.get('max_memory_mb', 0):,.1f} MB; {counts.get('hits', 0)} hits, {counts.get('misses', 0)} misses, "
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
