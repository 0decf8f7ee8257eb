"""A cache of image features, by salt and digest, within a byte budget. It knows neither mlx nor a clock.

Requests of different salts share nothing, because a quick answer would show that another client had sent the image. The
least recently used entry is evicted first. Rows copy the features that they need, so an entry may be evicted between
any two steps; the vision encoder then runs again. Entries that a step needs are held until the next step is planned.
"""

from typing import Protocol, TypeVar

from ..util.lru import LRU


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


V = TypeVar("V", bound=Sized)
Key = tuple[str, bytes]  # (salt, digest of the encoder inputs)


class MediaCache(LRU[Key, V]):
    def __init__(self, max_bytes: int):
        super().__init__(max_bytes)
        self._held: set[Key] = set()
        self.num_encoded = 0  # runs of the vision encoder
        self.longest_encode_s = 0.0
        self.num_evictions = 0

    def hold(self, key: Key) -> None:
        """Protect this entry from eviction until `release`, even if it is stored later."""
        self._held.add(key)

    def release(self) -> None:
        """Allow the eviction of all held entries again."""
        self._held.clear()

    @property
    def held_bytes(self) -> int:
        return sum(self._entries[key][1] for key in self._held if key in self)

    def store(self, key: Key, features: V, *, seconds: float = 0.0) -> None:
        """Store features that the vision encoder took `seconds` to compute.

        The newest entry stays even if it is larger than the budget, until the next `store` or `shrink_to`.
        """
        self.add(key, features, features.nbytes)
        self.num_encoded += 1
        self.longest_encode_s = max(self.longest_encode_s, seconds)
        self.num_evictions += len(self.evict(spared={*self._held, key}))

    def shrink_to(self, num_bytes: int) -> None:
        """Evict entries until at most `num_bytes` are used, or only held ones are left."""
        self.num_evictions += len(self.evict(num_bytes, self._held))

    def clear(self, salts: str = "") -> int:
        """Remove the entries whose salt begins with `salts`. Returns the bytes freed."""
        before = self.used_bytes
        for key in [key for key in self if key[0].startswith(salts)]:
            self.pop(key)
        return before - self.used_bytes
