"""What vision towers made of images, by salt and digest, within a number of bytes. Opaque values; no mlx, no clock.

Requests of different salts share nothing, or one could tell by its time that a picture was seen by another. The least
recently used go first. Rows copy what they need into their own state, so an entry may go at any time: the tower is then
run again.
"""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


V = TypeVar("V", bound=Sized)
Key = tuple[str, bytes]  # salt, and digest of what the tower takes


class MediaCache(Generic[V]):
    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Key, V] = OrderedDict()
        self.used_bytes = 0
        self.num_encoded = 0  # times that a tower was run
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

    def put(self, key: Key, value: V, *, seconds: float = 0.0) -> None:
        """`seconds`: that the tower took. The newest entry stays even if too large, until the next or `shrink_to`."""
        assert key not in self._entries
        self._entries[key] = value
        self.num_encoded += 1
        self.longest_encode_s = max(self.longest_encode_s, seconds)
        self.used_bytes += value.nbytes
        while self.used_bytes > self.max_bytes and len(self._entries) > 1:
            self._evict()

    def shrink_to(self, num_bytes: int) -> None:
        while self.used_bytes > num_bytes and self._entries:
            self._evict()

    def clear(self, salts: str = "") -> int:
        """Removes those whose salt begins so. Returns the bytes freed."""
        before = self.used_bytes
        for key in [key for key in self._entries if key[0].startswith(salts)]:
            self.used_bytes -= self._entries.pop(key).nbytes
        return before - self.used_bytes

    def _evict(self) -> None:
        _, value = self._entries.popitem(last=False)
        self.used_bytes -= value.nbytes
        self.num_evictions += 1
