"""Positions behind the n-grams of a token text, in sorted numpy arrays. It knows no reply and no drafts.

An entry is one 64-bit number: 40 bits of the n-gram's hash above the 24 bits of the position behind it. Entries of one
hash are therefore neighbours, in the order of their positions. The tokens themselves decide whether an entry is right.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

SIZES: Final = (6, 3)  # tokens of an n-gram; the longer one is looked up first
_POSITION_BITS = 24
_POSITION = (1 << _POSITION_BITS) - 1
_MOST_COMPARED = 8  # entries of one hash, so that collisions cost no time
_WORD = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, which spreads neighbours far apart


def hashed(ngram: Iterable[Any]) -> Any:
    """Hash an n-gram into the upper 40 bits of 64. It takes Python integers, or a numpy array for each place."""
    total: Any = 0
    for token in ngram:
        total = ((total + token) * _FACTOR) & _WORD
    return total & (_WORD ^ _POSITION)


class PromptIndex:
    """Finds where an n-gram of a text occurred before. Immutable: one thread makes it, and others may read it.

    `token_ids` is kept, and not copied if it is a tuple. The index has at most 16 bytes for each of its tokens.
    """

    __slots__ = ("_entries", "token_ids")

    def __init__(self, token_ids: Sequence[int]):
        assert len(token_ids) <= _POSITION, "a position would not fit"
        self.token_ids = tuple(token_ids)
        ids = np.array(self.token_ids, dtype=np.uint64)
        self._entries = {size: _entries(ids, size) for size in SIZES}

    @property
    def nbytes(self) -> int:
        return sum(entries.nbytes for entries in self._entries.values())

    def find(self, last: Sequence[int], sizes: Iterable[int] = SIZES, start: int | None = None) -> int | None:
        """Find the longest n-gram that ends `last` and that a token of the text follows. Return that token's position.

        Of several, the latest is returned; with `start`, the first from there on, or else the latest.
        """
        for size in sizes:
            ngram = tuple(last[-size:])
            if len(ngram) == size:
                found = None if start is None else self._find(ngram, start, 1)
                found = self._find(ngram, _POSITION, -1) if found is None else found
                if found is not None:
                    return found
        return None

    def _find(self, ngram: tuple[int, ...], start: int, direction: int) -> int | None:
        """Find the position that is nearest to `start` in one direction."""
        entries, key = self._entries[len(ngram)], hashed(ngram)
        first = int(entries.searchsorted(np.uint64(key | start))) - (direction < 0)
        for at in range(first, first + _MOST_COMPARED * direction, direction):
            entry = int(entries[at]) if 0 <= at < len(entries) else -1
            if entry & ~_POSITION != key:
                return None
            position = entry & _POSITION
            if self.token_ids[position - len(ngram) : position] == ngram:
                return position
        return None


def _entries(ids: Any, size: int) -> Any:
    """Return the sorted entries of all n-grams of `size` tokens that have a token behind them."""
    count = max(len(ids) - size, 0)
    entries = hashed(ids[place : place + count] for place in range(size)) | np.arange(
        size, size + count, dtype=np.uint64
    )
    entries.sort()
    entries.setflags(write=False)
    return entries
