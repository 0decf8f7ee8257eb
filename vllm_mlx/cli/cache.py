"""`vllm-mlx cache`: what a running server's prefix cache holds, or what is kept on this machine's disk."""

import json
from operator import itemgetter
from typing import Annotated, Any

from rich.tree import Tree

from .remote import KeyOption, UrlOption, find_server
from .status import disk_line
from .terminal import AsJson, console, option, readable

_MAX_ENTRIES = 200


def cache(
    clear: Annotated[bool, option("--clear", None, "Remove all cached state. Running replies go on.")] = False,
    as_json: AsJson = False,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Print what the server's prefix cache holds, or clear it."""
    server = find_server(url, api_key, as_admin=True)
    held = server.delete("/v1/cache") if clear else server.get("/v1/cache")
    if as_json:
        print(json.dumps(held, indent=2))
    elif clear:
        print(f"The cache is empty: {readable(int(held['freed_bytes']))} were freed.")
    else:
        console().print(cache_tree(held["data"], held["cache"]))


def cache_tree(entries: list[dict[str, Any]], counts: dict[str, Any]) -> Tree:
    """Runs of tokens, each below the run that it continues, so that a shared beginning occurs once."""
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
    return root


def _entry(entry: dict[str, Any]) -> str:
    num_bytes = entry["segment_bytes"] + entry["state_bytes"]
    state = ", a snapshot" if entry["state_bytes"] else ""
    salted = ", salted" if entry.get("salted") else ""
    return f"tokens {entry['start']:,}–{entry['end']:,}  {readable(num_bytes)}{state}, {entry['hits']} hits{salted}"
