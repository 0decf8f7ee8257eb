"""API keys, and the shares of tenants in common limits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class APIKey:
    """A key that clients send, and the name that stands for it in logs."""

    name: str
    secret: str = field(repr=False)
    is_admin: bool = False  # may see, cancel and clear requests and state of others


def unnamed_keys(secrets: Iterable[str], *, taken: Iterable[str] = ()) -> tuple[APIKey, ...]:
    """Name the keys `key1`, `key2` and so on, without the names in `taken`."""
    used = set(taken)
    keys: list[APIKey] = []
    number = 0
    for secret in secrets:
        number += 1
        while f"key{number}" in used:
            number += 1
        keys.append(APIKey(f"key{number}", secret))
    return tuple(keys)


def has_room(held: Mapping[T, int], tenant: T, amount: int, limit: int) -> bool:
    """Return whether `tenant` may take `amount` more of `limit`, if each tenant has the amount in `held` now.

    One tenant alone may take everything. If others have filled it, a tenant may still take its equal share. All may
    together hold more than `limit` then, until the others have given back the part above their share.
    """
    if sum(held.values()) + amount <= limit:
        return True
    active = {name for name, num in held.items() if num} | {tenant}
    return held.get(tenant, 0) + amount <= limit // len(active)
