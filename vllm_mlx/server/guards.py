"""Access rules: guards refuse requests by host name, API key or rate, before a route or a body is read.

The tenant of a request is the API key that owns it. Tenants share no cached state, so none can time another's prompts.
A tenant cannot cancel, clear or read requests and state of another; an administrator may cancel and clear them.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import TooManyRequests, setting, shown
from ..core.request import Request
from ..util.tenants import APIKey
from .error_handlers import envelope_of, http_error, respond

ANY = "*"
_ALWAYS = frozenset({"localhost", "host.docker.internal"})  # the second is this machine's name in its containers
# The page asks for the key itself and displays nothing without it. Clients probe the others before they send a key.
OPEN_PATHS = frozenset({"/", "/health", "/version", "/api/hello"})
METRICS_PATH = "/metrics"
_NOT_ADMIN = (
    "Only clients on the server's machine or holders of an admin key may do this: start the server with "
    f"{setting('admin_key_file')}, and send a key of that file."
)
_OF_TENANT = re.compile(r"[0-9a-f]{64}/")  # how the salt of a request with a key begins
NO_KEY = "Send a valid API key: `Authorization: Bearer KEY` or `x-api-key: KEY`."
MAX_CLIENTS = 10_000  # the client that was silent longest is forgotten, and then treated like a new one


class GuardMiddleware:
    """Sends the refusal of `guard`, or calls the application if there is none."""

    def __init__(self, app: ASGIApp, guard: Callable[[Scope], Response | None]) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._guard(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)


def own_names() -> tuple[str, ...]:
    """Return the names of this machine in its network."""
    name = _bare(socket.gethostname())
    first = name.partition(".")[0]
    return tuple(dict.fromkeys((name, first, f"{first}.local"))) if first else ()


def names_with(given: Iterable[str]) -> frozenset[str]:
    """Return the host names to which the server answers: those of this machine, and the given ones."""
    return _ALWAYS.union(map(_bare, (*own_names(), *given)))


def refuse_host(names: frozenset[str], scope: Scope) -> Response | None:
    """Answer 403 to requests for other host names than `names`.

    A web page may point its own name at this machine. Addresses and missing names are accepted: no page can own them.
    """
    asked = [_bare(value) for value in Headers(scope=scope).getlist("host") if value]
    foreign = [name for name in asked if name not in names and not name.endswith(".localhost") and not _address(name)]
    if not foreign or ANY in names:
        return None
    name = shown(foreign[0])
    message = (
        f"This server does not answer to the host name `{name}`. To allow it, start the server with "
        f"{setting('allowed_host')} {name}."
    )
    return http_error(scope, 403, message)


def refuse_site(allowed: Collection[str], scope: Scope) -> Response | None:
    """Answer 403 to requests from web pages of other origins, which could start or end work without reading the reply.

    Browsers name the page's origin, or say that it is another one; other programs say nothing. A link may lead to `/`.
    """
    headers = Headers(scope=scope)
    origins, site = headers.getlist("origin"), headers.get("sec-fetch-site", "none")
    own = set(headers.getlist("host")) - {""}  # an origin without a name, such as `null`, is not a page of this server
    foreign = [origin for origin in origins if origin.partition("://")[2] not in own]
    is_link = scope["path"] == "/" and not origins and headers.get("sec-fetch-mode") == "navigate"
    is_own = not foreign and site in ("none", "same-origin")
    if is_own or is_link or ANY in allowed or (origins and set(allowed).issuperset(origins)):
        return None
    origin = shown(foreign[0]) if foreign else "ORIGIN"
    message = (
        "A web page of another origin sent this request. To let it use the server, start the server with "
        f"{setting('cors_origin')} {origin}."
    )
    return http_error(scope, 403, message)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _bare(host: str) -> str:
    """Return the host without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return (name if name and ":" not in name and port.isdecimal() else host).rstrip(".")


class KeyCheck:
    """Answers 401 to requests without a valid API key, except on the open paths. Notes the tenant of valid keys.

    If all keys are admin keys, requests without a key are accepted too, but cannot manage the server.
    """

    def __init__(self, api_keys: Iterable[APIKey], open_paths: Iterable[str] = ()) -> None:
        self._open_paths = OPEN_PATHS | frozenset(open_paths)
        self._keys = [(_digest(key.secret.encode()), key) for key in api_keys]
        self._asks_for_key = any(not key.is_admin for _, key in self._keys)

    def __call__(self, scope: Scope) -> Response | None:
        if scope["path"] in self._open_paths:
            return None
        digest = _digest(_given_key(scope))
        key = self._key_of(digest)
        if key is None and self._asks_for_key:
            response = http_error(scope, 401, NO_KEY)
            response.headers["www-authenticate"] = "Bearer"
            return response
        state = scope.setdefault("state", {})
        state["is_admin"] = key is not None and (key.is_admin or len(self._keys) == 1)
        if key is not None:
            state["tenant"], state["key_name"] = digest.hex(), key.name
        return None

    def _key_of(self, given: bytes) -> APIKey | None:
        # All digests have the same length and all are compared in constant time, so timing reveals nothing.
        matches = [key for digest, key in self._keys if hmac.compare_digest(given, digest)]
        return matches[0] if matches else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"vllm-mlx key " + key).digest()


def _given_key(scope: Scope) -> bytes:
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1")


class RateLimit:
    """Answers 429 with `retry-after` if one client sends too many requests a minute.

    A client is an API key, or an address if no key is needed. Only POST requests count, since they cause work.
    """

    def __init__(self, per_minute: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (requests left, at this time)

    def __call__(self, scope: Scope) -> Response | None:
        if scope["method"] != "POST":
            return None
        wait_s = self.take(tenant_of(scope) or (scope.get("client") or ("",))[0])
        if wait_s <= 0:
            return None
        error = TooManyRequests(
            f"This client may send {self._per_minute} requests a minute ({setting('max_requests_per_minute')}).",
            retry_after_s=wait_s,
        )
        scope["state"]["record"].error_code = error.code
        return respond(envelope_of(scope["path"]).error(error), scope)

    def take(self, client: str) -> float:
        """Return the seconds that this client must wait; 0 if the request is accepted."""
        now = self._clock()
        left, at_s = self._left.pop(client, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - at_s) * self._per_minute / 60)
        may_come = left >= 1
        self._left[client] = (left - 1 if may_come else left, now)
        if len(self._left) > MAX_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if may_come else (1 - left) * 60 / self._per_minute


def tenant_of(scope: Scope) -> str:
    """Return the tenant of the API key that was sent; empty if no key is needed."""
    tenant: str = scope.get("state", {}).get("tenant", "")
    return tenant


def is_admin(scope: Scope) -> bool:
    """Return whether the sender may see, cancel and clear requests and state of any client.

    An admin key allows this, and so does the only key. If there are no keys, clients on this machine may do it.
    """
    by_key: bool | None = scope.get("state", {}).get("is_admin")
    return _comes_from_this_machine(scope) if by_key is None else by_key


def shown_model(scope: Scope, model: str) -> str:
    """Return a checkpoint as the sender may see it: only an administrator sees the path of a folder."""
    return model if is_admin(scope) or not Path(model).is_absolute() else Path(model).name


def require_admin(scope: Scope) -> None:
    """Raise HTTPException unless the sender manages the server."""
    if not is_admin(scope):
        raise HTTPException(403, _NOT_ADMIN)


def managed_salts(scope: Scope) -> str:
    """Return the prefix of the salts of all requests that the sender may cancel or clear. Raises HTTPException."""
    if is_admin(scope):
        return ""
    tenant = tenant_of(scope)
    if not tenant:
        raise HTTPException(403, _NOT_ADMIN)
    return _salts_of(tenant)


def may_see(scope: Scope, salt: str) -> bool:
    """Return whether cached state with this salt is the sender's, or the sender manages the server."""
    tenant = tenant_of(scope)
    return is_admin(scope) or (salt.startswith(_salts_of(tenant)) if tenant else not _OF_TENANT.match(salt))


def with_tenant(request: Request, scope: Scope) -> Request:
    """Return the request with its tenant, and with a salt that no other tenant has."""
    tenant = tenant_of(scope)
    if not tenant:
        return request
    return replace(request, tenant=tenant, cache_salt=_salts_of(tenant) + request.cache_salt)


def _salts_of(tenant: str) -> str:
    return f"{tenant}/"


def _comes_from_this_machine(scope: Scope) -> bool:
    """Return whether the client is on this machine. A client of a Unix socket has no address."""
    if (client := scope.get("client")) is None:
        return True
    address = _address(client[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address is not None and (mapped or address).is_loopback
