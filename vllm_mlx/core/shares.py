"""How tenants share what is bounded for all of them together."""

from collections.abc import Mapping


def has_room(held: Mapping[str, int], tenant: str, amount: int, limit: int) -> bool:
    """Whether `tenant` may take `amount` more of `limit`; `held`: what each tenant has of it now.

    One tenant alone may take everything. Where others have filled it, a tenant may still take its even share: all
    together may then hold more than `limit` until the others have given back what is above their share.
    """
    if sum(held.values()) + amount <= limit:
        return True
    active = {name for name, num in held.items() if num} | {tenant}
    return held.get(tenant, 0) + amount <= limit // len(active)
