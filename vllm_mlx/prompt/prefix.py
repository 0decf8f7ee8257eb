"""How much two sequences have in common at their start."""

from collections.abc import Sequence
from typing import Any


def common_prefix(a: str | Sequence[Any], b: str | Sequence[Any]) -> int:
    """By halving: comparing slices costs a fraction of comparing elements."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
