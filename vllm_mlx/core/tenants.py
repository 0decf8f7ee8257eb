"""API keys, and how tenants share what is bounded for all of them together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class APIKey:
    """A key that clients send, and the name that stands for it in logs."""

    name: str
    secret: str = field(repr=False)
    is_admin: bool = False  # may see, cancel and clear what belongs to others
    priority: int = 1  # how many times the share of a key of priority 1 its holder gets


def unnamed_keys(secrets: Iterable[str], *, taken: Iterable[str] = ()) -> tuple[APIKey, ...]:
    """Named `key1`, `key2` and so on; names in `taken` are left out."""
    used = set(taken)
    keys: list[APIKey] = []
    number = 0
    for secret in secrets:
        number += 1
        while f"key{number}" in used:
            number += 1
        keys.append(APIKey(f"key{number}", secret))
    return tuple(keys)


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
