"""Where the tokens of a row stand for models that lay media out in a grid (mRoPE). Arithmetic on layouts; no mlx.

Qwen2-VL (arXiv 2409.12191): text advances all three axes by one a token; what follows an image or a video goes on
behind the longest axis of it.
"""

from collections.abc import Iterable

import numpy as np

from ..core.sequence import MediaItem


def chunk_positions(media: Iterable[MediaItem], start: int, end: int) -> np.ndarray:
    """`(3, end - start)`, int32: of the row's tokens `[start, end)`, whose media are given in order."""
    positions = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    moved = 0
    for item in media:
        if item.offset >= end:
            break
        assert item.layout is not None, "only media that are laid out have positions of their own"
        low, high = max(item.offset, start), min(item.end, end)
        if low < high:
            laid_out = item.layout.positions[:, low - item.offset : high - item.offset]
            positions[:, low - start : high - start] = item.offset + moved + laid_out
        positions[:, max(item.end - start, 0) :] += item.layout.advance - item.length
        moved += item.layout.advance - item.length
    return positions


def text_delta(media: Iterable[MediaItem]) -> int:
    """What is added to the index of a token behind all media."""
    return sum(item.layout.advance - item.length for item in media if item.layout is not None)
