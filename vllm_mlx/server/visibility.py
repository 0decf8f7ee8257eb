"""The status as one client may see it: of requests with other keys, figures and codes without words or ids."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from starlette.types import Scope

from .tenants import is_admin, tenant_of

_LISTS = ("requests", "last_replies", "last_errors")
_PATHS = frozenset(
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "messages/count_tokens", "responses")
)
_SOME_PATH = "/v1/…"  # others hold ids, or what a client made up

Entry = Mapping[str, Any]


def visible_to(scope: Scope, status: Mapping[str, Any]) -> dict[str, Any]:
    """Holders of an admin key see all of it, and so does everybody where no key or one key is asked for."""
    sees = partial(_may_see, tenant_of(scope), is_admin(scope))
    return {**status, **{name: _entries(status[name], sees) for name in _LISTS}}


def _may_see(viewer: str, sees_all: bool, entry: Entry) -> bool:
    return sees_all or entry["tenant"] == viewer


def _entries(entries: Iterable[Entry], sees: "partial[bool]") -> list[dict[str, Any]]:
    shown = [dict(entry) if sees(entry) else _without_words(entry) for entry in entries]
    return [{name: value for name, value in entry.items() if name != "tenant"} for entry in shown]


def _without_words(entry: Entry) -> dict[str, Any]:
    """Reasons keep their first word, since token ids follow it."""
    hidden = {**entry, "request_id": None}
    if "message" in hidden:
        hidden["message"] = None
    if hidden.get("path") not in (None, *_PATHS):
        hidden["path"] = _SOME_PATH
    for name in ("why", "why_not_cached"):
        if hidden.get(name):
            hidden[name] = hidden[name].partition(":")[0]
    return hidden
