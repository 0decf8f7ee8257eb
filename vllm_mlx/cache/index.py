"""Token paths in sorted order, found by bisect. This module knows keys and their values, but no tree.

A path is packed into one big-endian 8-byte word per token. Packed paths sort exactly like the tuples of ids, and
comparing them is as fast as comparing memory.
"""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

WORD_BYTES = 8
_MAX_STEP = 1 << 15  # bytes compared at a time, so that they stay in the processor's cache

T = TypeVar("T")


def pack(ids: Iterable[int]) -> bytes:
    """Pack token ids, all in [0, 2**64), into a key."""
    words = array("Q", ids)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def num_tokens(key: bytes) -> int:
    return len(key) // WORD_BYTES


def common_tokens(a: bytes, b: bytes) -> int:
    """Return the number of tokens in the longest common prefix of two keys."""
    low, step, limit = 0, 64, min(len(a), len(b))
    while True:
        if low == limit:
            return low // WORD_BYTES
        high = min(low + step, limit)
        if a[low:high] != b[low:high]:
            return _first_difference(a, b, low, high) // WORD_BYTES
        low, step = high, min(2 * step, _MAX_STEP)


def _first_difference(a: bytes, b: bytes, low: int, high: int) -> int:
    """Index of the first byte in [low, high) that differs. The caller knows that there is one."""
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class SortedPaths(Generic[T]):
    """A sorted list of paths with their leaves. No path is a prefix of another."""

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
        """Return a leaf whose path has the longest prefix in common with `key`, and that length in tokens.

        All paths that share a prefix with the key are neighbours in the list, so one of the two paths next to the
        key's place shares the most.
        """
        at = bisect_left(self._keys, key)
        best, length = None, 0
        for neighbour in (at - 1, at):
            if 0 <= neighbour < len(self._keys):
                common = common_tokens(self._keys[neighbour], key)
                if common > length:
                    best, length = self._leaves[neighbour], common
        return best, length

    def under(self, prefix: bytes) -> list[T]:
        """Return the leaves of all paths that begin with `prefix`."""
        first = at = bisect_left(self._keys, prefix)
        while at < len(self._keys) and self._keys[at].startswith(prefix):
            at += 1
        return self._leaves[first:at]

    def add(self, key: bytes, leaf: T) -> None:
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._leaves.insert(at, leaf)

    def remove(self, key: bytes) -> None:
        at = self._find(key)
        del self._keys[at], self._leaves[at]

    def replace(self, old: bytes, key: bytes, leaf: T) -> None:
        """Replace a path by a longer or shorter one. Its place in the order must stay the same."""
        at = self._find(old)
        self._keys[at], self._leaves[at] = key, leaf

    def _find(self, key: bytes) -> int:
        at = bisect_left(self._keys, key)
        assert at < len(self._keys) and self._keys[at] == key, "path is not in the index"
        return at
