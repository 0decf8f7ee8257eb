"""Words that the Tab key completes: clients, models on this machine, and names that a server serves."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from ..core.errors import ConfigError

_ANSWER_S = 2.0  # a server that does not answer in time has no names to complete


def clients(incomplete: str) -> list[tuple[str, str]]:
    """Return the clients of `launch` that begin so, each with its title."""
    from .clients import CLIENTS

    return [(name, row.title) for name, row in CLIENTS.items() if name.startswith(incomplete)]


def downloaded(incomplete: str) -> list[str]:
    """Return the models on this machine that begin so."""
    from .models import cached_models

    return _that_begin(incomplete, (model.name for model in cached_models()))


def served(incomplete: str) -> list[str]:
    """Return the names that begin so, of the server with the settings of this machine."""
    from .remote import find_server
    from .terminal import CommandFailed

    with suppress(CommandFailed, ConfigError):
        models = replace(find_server(None, None), answer_s=_ANSWER_S).models()
        return _that_begin(incomplete, (model.name for model in models))
    return []


def served_or_downloaded(incomplete: str) -> list[str]:
    """Return the models that a server serves, or those that it could."""
    return list(dict.fromkeys([*served(incomplete), *downloaded(incomplete)]))


def _that_begin(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
