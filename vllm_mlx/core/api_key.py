"""A key that clients send, and the name that stands for it in logs."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class APIKey:
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
