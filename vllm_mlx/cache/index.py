"""Token paths in sorted order, found by bisect. Knows bytes and what hangs on them: no tree, no segments.

A path is packed: one big-endian 8-byte word a token. Packed paths sort exactly as the tuples of ids do, and compare
at memory speed.
"""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

WORD_BYTES = 8
_MAX_STEP = 1 << 15  # bytes compared at a time: small enough to stay in the processor's cache

T = TypeVar("T")


def pack(ids: Iterable[int]) -> bytes:
    """Token ids, each in [0, 2**64), as a key."""
    words = array("Q", ids)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def num_tokens(key: bytes) -> int:
    return len(key) // WORD_BYTES


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix of two keys, in tokens."""
    low, step, limit = 0, 64, min(len(a), len(b))
    while True:
        if low == limit:
            return low // WORD_BYTES
        high = min(low + step, limit)
        if a[low:high] != b[low:high]:
            return _first_difference(a, b, low, high) // WORD_BYTES
        low, step = high, min(2 * step, _MAX_STEP)


def _first_difference(a: bytes, b: bytes, low: int, high: int) -> int:
    """The first byte in [low, high) that differs; there is one."""
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class SortedPaths(Generic[T]):
    """Paths of which none is a prefix of another, each with its leaf."""

    __slots__ = ("_keys", "_leaves")

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._leaves: list[T] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[tuple[bytes, T]]:
        return zip(self._keys, self._leaves, strict=True)

    @property
    def leaves(self) -> tuple[T, ...]:
        return tuple(self._leaves)

    def nearest(self, key: bytes) -> tuple[T | None, int]:
        """A leaf whose path has the longest prefix in common with `key`, and that length in tokens.

        Whatever shares a prefix with the key stands in one run around it, so its two neighbours share the most.
        """
        at = bisect_left(self._keys, key)
        best, length = None, 0
        for neighbour in (at - 1, at):
            if 0 <= neighbour < len(self._keys):
                common = common_tokens(self._keys[neighbour], key)
                if common > length:
                    best, length = self._leaves[neighbour], common
        return best, length

    def add(self, key: bytes, leaf: T) -> None:
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._leaves.insert(at, leaf)

    def remove(self, key: bytes) -> None:
        at = self._find(key)
        del self._keys[at], self._leaves[at]

    def replace(self, old: bytes, key: bytes, leaf: T) -> None:
        """One path is cut or extended beyond what it shares with any other, so its place stays."""
        at = self._find(old)
        self._keys[at], self._leaves[at] = key, leaf

    def _find(self, key: bytes) -> int:
        at = bisect_left(self._keys, key)
        assert at < len(self._keys) and self._keys[at] == key, "path is not in the index"
        return at
