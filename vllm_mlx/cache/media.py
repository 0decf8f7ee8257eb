"""A cache of image features, by salt and digest, within a byte budget. Values are opaque; it knows no mlx, no clock.

Requests of different salts share nothing, because the time of a hit would show that somebody else sent the image. The
least recently used entry is evicted first. Rows copy the features that they need, so an entry may be evicted between
any two steps; the vision encoder then runs again. Entries that a step needs are held until the next step is planned.
"""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


V = TypeVar("V", bound=Sized)
Key = tuple[str, bytes]  # (salt, digest of the encoder inputs)


class MediaCache(Generic[V]):
    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Key, V] = OrderedDict()
        self._held: set[Key] = set()
        self.used_bytes = 0
        self.num_encoded = 0  # runs of the vision encoder
        self.longest_encode_s = 0.0
        self.num_evictions = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> V | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def hold(self, key: Key) -> None:
        """Protect this entry from eviction until `release`, even if it is stored later."""
        self._held.add(key)

    def release(self) -> None:
        """Allow the eviction of all held entries again."""
        self._held.clear()

    @property
    def held_bytes(self) -> int:
        return sum(self._entries[key].nbytes for key in self._held if key in self._entries)

    def put(self, key: Key, value: V, *, seconds: float = 0.0) -> None:
        """Store features that the vision encoder took `seconds` to compute.

        The newest entry stays even if it is larger than the budget, until the next `put` or `shrink_to`.
        """
        assert key not in self._entries
        self._entries[key] = value
        self.num_encoded += 1
        self.longest_encode_s = max(self.longest_encode_s, seconds)
        self.used_bytes += value.nbytes
        self._evict(self.max_bytes, but=key)

    def shrink_to(self, num_bytes: int) -> None:
        """Evict entries until at most `num_bytes` are used, or only held ones are left."""
        self._evict(num_bytes)

    def clear(self, salts: str = "") -> int:
        """Remove the entries whose salt begins with `salts`. Returns the bytes freed."""
        before = self.used_bytes
        for key in [key for key in self._entries if key[0].startswith(salts)]:
            self.used_bytes -= self._entries.pop(key).nbytes
        return before - self.used_bytes

    def _evict(self, num_bytes: int, *, but: Key | None = None) -> None:
        if self.used_bytes <= num_bytes:
            return
        for key in [key for key in self._entries if key not in self._held and key != but]:
            self.used_bytes -= self._entries.pop(key).nbytes
            self.num_evictions += 1
            if self.used_bytes <= num_bytes:
                return
