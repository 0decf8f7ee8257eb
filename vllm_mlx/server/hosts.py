"""Names under which the server answers. A web page may point its own name at this machine; that one is refused."""

import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import setting, shown
from .error_handlers import http_error

ANY = "*"
_ALWAYS = frozenset({"localhost", "host.docker.internal"})  # the latter: this machine, as its containers call it


class HostCheck:
    """Answers 403 to requests for other names. An address, or no name at all, is nothing that a page could own."""

    def __init__(self, app: ASGIApp, *, names: Iterable[str]) -> None:
        self._app = app
        self._names = _ALWAYS | {_bare(name) for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = [] if scope["type"] != "http" else [name for name in _asked(scope) if not self._is_ours(name)]
        if not wrong:
            await self._app(scope, receive, send)
            return
        name = shown(wrong[0])
        message = (
            f"This server does not go by the name `{name}`. If it should, start it with "
            f"{setting('allowed_host')} {name}."
        )
        await http_error(scope["path"], 403, message)(scope, receive, send)

    def _is_ours(self, name: str) -> bool:
        return name in self._names or ANY in self._names or name.endswith(".localhost") or is_address(name)


def own_names() -> tuple[str, ...]:
    """Those by which its network knows this machine."""
    name = _bare(socket.gethostname())
    first = name.partition(".")[0]
    return tuple(dict.fromkeys(each for each in (name, first, f"{first}.local") if first))


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _asked(scope: Scope) -> list[str]:
    return [_bare(value) for value in Headers(scope=scope).getlist("host") if value]


def _bare(host: str) -> str:
    """Without port, brackets and case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return (name if name and ":" not in name and port.isdecimal() else host).rstrip(".")
