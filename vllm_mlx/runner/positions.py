"""Where tokens stand for models that lay images out in a grid (mRoPE). Arithmetic on offsets and grids; no mlx.

Qwen2-VL (arXiv 2409.12191): text advances all three axes by one a token; an image of a grid (t, h, w) spans t, h and w
positions from where it begins, and what follows it goes on behind the longest of these.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Placed:
    """An image in a row: tokens `[offset, offset + t·h·w)`."""

    offset: int
    grid: tuple[int, int, int]  # (t, h, w), in tokens

    @property
    def length(self) -> int:
        t, h, w = self.grid
        return t * h * w

    @property
    def delta(self) -> int:
        """How much further on than its tokens the positions behind it are; mostly negative."""
        return max(self.grid) - self.length


def chunk_positions(images: Iterable[Placed], start: int, end: int) -> np.ndarray:
    """`(3, end - start)`, int32: of the row's tokens `[start, end)`, whose images are given in order."""
    positions = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    for image in images:
        if image.offset >= end:
            break
        low, high = max(image.offset, start), min(image.offset + image.length, end)
        if low < high:
            axes = np.indices(image.grid, dtype=np.int32).reshape(3, -1)
            moved = positions[0, low - start] - low  # of text here, by the images before
            positions[:, low - start : high - start] = (
                image.offset + moved + axes[:, low - image.offset : high - image.offset]
            )
        positions[:, max(image.offset + image.length - start, 0) :] += image.delta
    return positions


def text_delta(images: Iterable[Placed]) -> int:
    """What is added to the index of a token behind all images."""
    return sum(image.delta for image in images)
