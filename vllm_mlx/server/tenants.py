"""Whose request this is. Holders of different keys share no cached state, so none can time another's prompts.

Nor can one end, clear or read what is another's. Where there is one key, or none, everything is its holder's.
"""

import ipaddress
from dataclasses import replace

from starlette.types import Scope

from ..core.request import Request


def tenant_of(scope: Scope) -> str:
    """The holder of the key that was sent; empty where no key is asked for."""
    tenant: str = scope.get("state", {}).get("tenant", "")
    return tenant


def is_admin(scope: Scope) -> bool:
    """Whether the sender may see, cancel and clear what belongs to any client.

    With API keys, the key decides. Without any, only clients on this machine may.
    """
    by_key: bool | None = scope.get("state", {}).get("is_admin")
    return _comes_from_this_machine(scope) if by_key is None else by_key


def own_salts(scope: Scope) -> str:
    """What the salts of all the holder's requests begin with."""
    is_alone = scope.get("state", {}).get("is_only_tenant", True)
    return "" if is_alone else _salts_of(tenant_of(scope))


def kept_apart(request: Request, scope: Scope) -> Request:
    tenant = tenant_of(scope)
    if not tenant:
        return request
    return replace(request, tenant=tenant, cache_salt=_salts_of(tenant) + request.cache_salt)


def _salts_of(tenant: str) -> str:
    return f"{tenant}/"


def _comes_from_this_machine(scope: Scope) -> bool:
    """A Unix socket has no address."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
