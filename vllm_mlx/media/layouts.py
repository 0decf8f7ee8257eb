"""Positions of the tokens of images and videos that form a grid (mRoPE). Arithmetic; knows no tokens.

Qwen2-VL (arXiv 2409.12191): a grid (t, h, w) spans t, h and w positions on three axes, counted from its start.
Qwen2.5-VL (arXiv 2502.13923) spaces the t axis of a video by time.
"""

from collections.abc import Iterable

import numpy as np

from ..core.sequence import Layout

Grid = tuple[int, int, int]  # (t, h, w), in tokens


def image_layout(grid: Grid) -> Layout:
    return Layout(_axes(grid), max(grid))


def video_layouts(grid: Grid, step: float, group: int) -> list[Layout]:
    """Layouts of a video that is one grid, in pieces of `group` along t. `step`: positions from one t to the next."""
    t, h, w = grid
    times = (np.arange(t + 1) * step).astype(np.int32)
    times[t] = max(times[t - 1] + 1, h, w)  # text after the video continues behind its longest axis
    layouts = []
    for first in range(0, t, group):
        last = min(t, first + group)
        positions = _axes((last - first, h, w))
        positions[0] = times[first:last][positions[0]]
        layouts.append(Layout(positions - times[first], int(times[last] - times[first])))
    return layouts


def joined(parts: Iterable[Layout | int]) -> Layout:
    """The layout of grids and texts in sequence; a text is given by its number of tokens."""
    positions, begin = [], 0
    for part in parts:
        if isinstance(part, int):
            part = Layout(np.tile(np.arange(part, dtype=np.int32), (3, 1)), part)
        positions.append(part.positions + begin)
        begin += part.advance
    return Layout(np.concatenate(positions, axis=1), begin)


def _axes(grid: Grid) -> np.ndarray:
    return np.indices(grid, dtype=np.int32).reshape(3, -1)
