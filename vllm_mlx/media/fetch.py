"""Fetches images, videos and documents over HTTP, from public addresses only. Knows no image formats.

A host name is resolved once for every hop. All its addresses are checked, and the connection goes to one of them,
because a second look-up could give another address.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import httpx

from .. import __version__
from ..core.config import MediaConfig
from ..core.errors import InvalidImage, setting
from ..util.fair_queue import FairThreads
from .sources import Kind, check_bytes

Resolve = Callable[[str, int], list[str]]  # host name, port -> numeric addresses; on a thread
_HEADERS = {"accept-encoding": "identity", "user-agent": f"vllm-mlx/{__version__}"}
_ACCEPT: Mapping[Kind, str] = {"document": "application/pdf, text/plain, text/*;q=0.5"}
_MAX_ADDRESSES = 4  # tried for one host name
# A look-up cannot be ended: it counts until the system ends it, even if its request has left.
_LOOKUPS, _LOOKUPS_PER_TENANT = 32, 24
_CONNECT_S = 3.0  # to connect to one address

# IANA's special-purpose registries: networks that `is_global` of some versions of Python, or parts of them, lets pass.
_SPECIAL = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20")))
_UNICAST_V6 = IPv6Network("2000::/3")  # everything that is assigned to hosts
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)  # the upper half of the interface identifier; the lower is an IPv4 address


class _Connections:
    """The connections of one request. httpx leaves one open if it is cancelled during the TLS handshake."""

    def __init__(self) -> None:
        self._streams: list[Any] = []

    async def note(self, event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._streams.append(info["return_value"])

    async def close(self) -> None:
        for stream in self._streams:
            await stream.aclose()


class MediaFetcher:
    """Fetches files, on one event loop. `resolve` and `is_allowed` are replaced in tests only."""

    def __init__(
        self,
        config: MediaConfig,
        *,
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ):
        self._config = config
        self._resolve = resolve or _resolve
        self._is_allowed = is_allowed or ((lambda address: True) if config.allow_private_media else is_public)
        self._ssl_context = ssl_context
        self._lookups = FairThreads(_LOOKUPS, "look-up", _LOOKUPS_PER_TENANT)

    @cached_property
    def _transport(self) -> httpx.AsyncHTTPTransport:
        # A kept connection would be shared by host names of one address, but checked for the first of them only.
        return httpx.AsyncHTTPTransport(
            verify=self._ssl_context or httpx.create_ssl_context(),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def fetch(self, url: str, *, kind: Kind = "image", tenant: str = "") -> bytes:
        """Download without credentials, cookies or proxies. Tenants take turns. Sets no time limit.

        Raises InvalidImage.
        """
        for _ in range(self._config.max_media_redirects + 1):
            hop = _checked(url)
            addresses = await self._addresses(hop, tenant)
            response = await self._send(hop, addresses, _ACCEPT.get(kind, f"{kind}/*"))
            try:
                if response.has_redirect_location:
                    url = _next_url(hop, response)
                    continue
                return await self._body(response, kind)
            except httpx.TransportError as error:
                raise InvalidImage(f"{_host(hop)} closed the connection before the file was complete.") from error
            finally:
                await response.aclose()
        raise InvalidImage(
            f"its address was redirected more than {self._config.max_media_redirects} times "
            f"({setting('max_media_redirects')}). Send its final address."
        )

    async def close(self) -> None:
        self._lookups.close()
        if "_transport" in self.__dict__:  # closing imports modules, which a program that was interrupted need not do
            await self._transport.aclose()

    async def _addresses(self, url: httpx.URL, tenant: str) -> tuple[str, ...]:
        """Return the numeric addresses to try. Raises InvalidImage unless all addresses of the host are allowed."""
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            addresses = await self._lookups.run(partial(self._resolve, _host(url), port), tenant)
        except (OSError, UnicodeError) as error:
            raise InvalidImage(f"there is no host {_host(url)}.") from error
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise InvalidImage(
                f"{_host(url)} is not on the public internet, and this server connects to no other hosts "
                f"({setting('allow_private_media')}). Send a data URL."
            )
        return tuple(dict.fromkeys(addresses))[:_MAX_ADDRESSES]

    async def _send(self, url: httpx.URL, addresses: Sequence[str], accept: str) -> httpx.Response:
        """Return the response of the first address that answers, up to its headers."""
        for address in addresses:
            opened = _Connections()
            request = _request(url, address, accept, opened)
            try:
                return await self._transport.handle_async_request(request)
            except asyncio.CancelledError:
                await opened.close()
                raise
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except httpx.TransportError as error:
                raise InvalidImage(f"{_host(url)} does not answer as HTTP.") from error
        raise InvalidImage(f"no connection to {_host(url)} could be made, or its certificate is not valid.")

    async def _body(self, response: httpx.Response, kind: Kind) -> bytes:
        if response.status_code != 200:
            raise InvalidImage(f"its server answered with status {response.status_code}.")
        headers = response.headers
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise InvalidImage("its server sent it compressed, although the request excludes that.")
        given = headers.get("content-type", "").partition(";")[0].strip().lower()
        if given and not any(fnmatchcase(given, pattern.lower()) for pattern in self._config.media_content_type):
            raise InvalidImage(
                f"its server sent the content type `{given[:60]}`, which is not allowed "
                f"({setting('media_content_type')})."
            )
        declared = headers.get("content-length", "")
        max_bytes = self._config.max_bytes(kind)
        check_bytes(int(declared[:18]) if declared.isdecimal() else 0, max_bytes, kind)
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            check_bytes(len(data), max_bytes, kind)
        return bytes(data)


def _checked(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
        port = url.port
    except (httpx.InvalidURL, ValueError) as error:  # also for impossible host names
        raise InvalidImage("its address is not a valid URL.") from error
    if url.scheme not in ("http", "https"):
        raise InvalidImage(f"its address leads to `{url.scheme[:20]}:`; only http and https are fetched.")
    if url.userinfo:
        raise InvalidImage("its address carries a user name or password. Leave them out.")
    if not url.raw_host:
        raise InvalidImage("its address names no host.")
    if port is not None and not 0 < port < 65536:
        raise InvalidImage("its address names no valid port.")
    return url


def _request(url: httpx.URL, address: str, accept: str, opened: _Connections) -> httpx.Request:
    """Return a request that goes to `address` and names the host of `url`."""
    return httpx.Request(
        "GET",
        url.copy_with(host=address, fragment=None),
        headers={**_HEADERS, "accept": accept, "host": url.netloc.decode("ascii")},
        extensions={
            "sni_hostname": _host(url).rstrip("."),
            "timeout": {"connect": _CONNECT_S},
            "trace": opened.note,
        },
    )


def _next_url(url: httpx.URL, response: httpx.Response) -> str:
    try:
        return str(url.join(response.headers["location"]))
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidImage(f"{_host(url)} redirects to an invalid URL.") from error


def _host(url: httpx.URL) -> str:
    """Return the host name as it is sent: the same for the look-up, the certificate and the request."""
    return url.raw_host.decode("ascii")


def _resolve(host: str, port: int) -> list[str]:
    """Ask the system, which understands every spelling of an address that it would connect to."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(text: str) -> bool:
    """Return whether `text` is the numeric address of a host on the public internet. False if it is not an address."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return _is_global(address) if isinstance(address, IPv4Address) else _is_public_v6(address)


def _is_global(address: IPv4Address | IPv6Address) -> bool:
    return address.is_global and not address.is_multicast and not any(address in network for network in _SPECIAL)


def _is_public_v6(address: IPv6Address) -> bool:
    """Return whether the address is public. An address that contains an IPv4 address counts as that one."""
    value = int(address)
    low = IPv4Address(value & 0xFFFFFFFF)
    if address.ipv4_mapped is not None or address in _NAT64:
        return _is_global(low)
    if address.sixtofour is not None:
        return _is_global(address.sixtofour)
    if value >> 32 & 0xFFFFFFFF in _ISATAP and not _is_global(low):
        return False
    return address in _UNICAST_V6 and _is_global(address)
