"""The tenant of a request: the API key that owns it. Tenants share no cached state, so none can time another's prompts.

A tenant cannot cancel, clear or read what another one owns; an administrator may cancel and clear it.
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
    """The tenant of the API key that was sent; empty if no key is needed."""
    tenant: str = scope.get("state", {}).get("tenant", "")
    return tenant


def priority_of(scope: Scope) -> int:
    """The priority of the API key that was sent."""
    priority: int = scope.get("state", {}).get("priority", 1)
    return priority


def is_admin(scope: Scope) -> bool:
    """Whether the sender may see, cancel and clear what any client owns.

    An admin key allows this, and so does the only key. If there are no keys, clients on this machine may do it.
    """
    by_key: bool | None = scope.get("state", {}).get("is_admin")
    return _comes_from_this_machine(scope) if by_key is None else by_key


def managed_salts(scope: Scope) -> str:
    """The prefix of the salts of all requests that the sender may cancel or clear. Raises HTTPException."""
    if is_admin(scope):
        return ""
    tenant = tenant_of(scope)
    if not tenant:
        raise HTTPException(403, _NOT_ADMIN)
    return _salts_of(tenant)


def with_tenant(request: Request, scope: Scope) -> Request:
    """The request with its tenant and priority, and with a salt that no other tenant has."""
    tenant = tenant_of(scope)
    if not tenant:
        return request
    salt = _salts_of(tenant) + request.cache_salt
    return replace(request, tenant=tenant, priority=priority_of(scope), cache_salt=salt)


def _salts_of(tenant: str) -> str:
    return f"{tenant}/"


def _comes_from_this_machine(scope: Scope) -> bool:
    """Whether the client is on this machine. A client of a Unix socket has no address."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
