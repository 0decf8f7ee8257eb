"""How tenants share what is bounded for all of them together."""

from collections.abc import Mapping
from types import MappingProxyType


def has_room(
    held: Mapping[str, int], tenant: str, amount: int, limit: int, priorities: Mapping[str, int] = MappingProxyType({})
) -> bool:
    """Whether `tenant` may take `amount` more of `limit`; `held`: what each tenant has of it now.

    One tenant alone may take everything. If others have filled it, a tenant may still take its share: all together may
    then hold more than `limit` until the others have given back what is above their share. Shares are in proportion to
    `priorities`, which are 1 for tenants that are not named.
    """
    if sum(held.values()) + amount <= limit:
        return True
    active = {name for name, num in held.items() if num} | {tenant}
    total = sum(priorities.get(name, 1) for name in active)
    return held.get(tenant, 0) + amount <= limit * priorities.get(tenant, 1) // total
