"""Whose request this is. Holders of different keys share no cached state, so none can time another's prompts.

Nor can one end, clear or read what is another's; an admin may end and clear it.
"""

import ipaddress
from dataclasses import replace

from starlette.exceptions import HTTPException
from starlette.types import Scope

from ..core.errors import setting
from ..core.request import Request

_NOT_ADMIN = (
    "Only clients on the server's machine or holders of an admin key may do this: start the server with "
    f"{setting('admin_key_file')}, and send a key of that file."
)


def tenant_of(scope: Scope) -> str:
    """The holder of the key that was sent; empty where no key is asked for."""
    tenant: str = scope.get("state", {}).get("tenant", "")
    return tenant


def priority_of(scope: Scope) -> int:
    """The priority of the key that was sent."""
    priority: int = scope.get("state", {}).get("priority", 1)
    return priority


def is_admin(scope: Scope) -> bool:
    """Whether the sender may see, cancel and clear what belongs to any client.

    Holders of an admin key may, and so may the holder of the only key. Where no key is asked for and there is no admin
    key, clients on this machine may.
    """
    by_key: bool | None = scope.get("state", {}).get("is_admin")
    return _comes_from_this_machine(scope) if by_key is None else by_key


def managed_salts(scope: Scope) -> str:
    """What the salts of all requests begin with that the sender may cancel or clear. Raises HTTPException."""
    if is_admin(scope):
        return ""
    tenant = tenant_of(scope)
    if not tenant:
        raise HTTPException(403, _NOT_ADMIN)
    return _salts_of(tenant)


def kept_apart(request: Request, scope: Scope) -> Request:
    tenant = tenant_of(scope)
    if not tenant:
        return request
    salt = _salts_of(tenant) + request.cache_salt
    return replace(request, tenant=tenant, priority=priority_of(scope), cache_salt=salt)


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
