"""Whose request this is. Holders of different keys share no cached state, so none can time another's prompts."""

from dataclasses import replace

from starlette.types import Scope

from ..core.request import Request


def tenant_of(scope: Scope) -> str:
    """The holder of the key that was sent; empty where no key is asked for."""
    tenant: str = scope.get("state", {}).get("tenant", "")
    return tenant


def kept_apart(request: Request, scope: Scope) -> Request:
    tenant = tenant_of(scope)
    return replace(request, cache_salt=f"{tenant}/{request.cache_salt}") if tenant else request
