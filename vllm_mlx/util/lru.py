"""A store of values within a number of bytes, which evicts the least recently used. It does not know the values."""

import threading
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """Safe to share between threads, except for iteration."""

    def __init__(self, max_bytes: int, max_entries: int | None = None) -> None:
        """`max_entries`: None if only the bytes are limited."""
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._max_entries = max_entries
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()  # value and bytes, the longest unused first
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Yield the keys, the least recently used first."""
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value, which now counts as used; None if it is not stored."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: K, value: V, num_bytes: int) -> list[tuple[K, V]]:
        """Store a value, which replaces the key's last one. Returns the entries evicted for it.

        A value larger than `max_bytes` is not stored and evicts nothing.
        """
        with self._lock:
            self.pop(key)
            if num_bytes > self.max_bytes:
                return []
            self.add(key, value, num_bytes)
            return self.evict()

    def add(self, key: K, value: V, num_bytes: int) -> None:
        """Store a value of a new key, even beyond the limits: `evict` enforces them."""
        with self._lock:
            assert key not in self._entries
            self._entries[key] = value, num_bytes
            self.used_bytes += num_bytes

    def pop(self, key: K) -> V | None:
        """Remove and return a value; None if it is not stored."""
        with self._lock:
            if key not in self._entries:
                return None
            value, num_bytes = self._entries.pop(key)
            self.used_bytes -= num_bytes
            return value

    def retire(self, key: K) -> None:
        """Make this entry the next to evict."""
        with self._lock:
            self._entries.move_to_end(key, last=False)

    def resize(self, max_bytes: int) -> list[tuple[K, V]]:
        """Change the limit. Returns the evicted entries."""
        self.max_bytes = max_bytes
        return self.evict()

    def evict(self, max_bytes: int | None = None, spared: Container[K] = ()) -> list[tuple[K, V]]:
        """Evict entries until the limits hold, or only `spared` ones are left. Returns the evicted keys and values.

        `max_bytes`: a lower limit for this call alone.
        """
        limit = self.max_bytes if max_bytes is None else max_bytes
        evicted: list[tuple[K, V]] = []
        with self._lock:
            while self._entries and self._exceeds(limit):
                key = self._victim(spared)
                if key is None:
                    break
                evicted.append((key, self._entries[key][0]))
                self.pop(key)
        return evicted

    def _victim(self, spared: Container[K]) -> K | None:
        """Return the entry to evict next, or None if all are spared."""
        return next((key for key in self._entries if key not in spared), None)

    @property
    def _is_full(self) -> bool:
        """Return whether there are too many entries."""
        return self._max_entries is not None and len(self._entries) > self._max_entries

    def _exceeds(self, max_bytes: int) -> bool:
        return self._is_full or self.used_bytes > max_bytes
