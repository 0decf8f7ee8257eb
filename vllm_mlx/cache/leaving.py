"""Turns a row that leaves into cached state. Its layers are copied a few at a time, and each is freed once copied.

So a row that takes most of the memory can stay in the prefix cache: the row and its copy never coexist completely.
Each part has its own buffers, so the number of buffers grows with the number of parts.
"""

import math
from itertools import accumulate
from typing import Any

from . import layers, snapshot
from .snapshot import Captured, KVSegment, RecurrentState

OwnRow = tuple[list[Any], list[Any], int]  # KV of one row alone; recurrent states, and the row's place in them
_MOST_PARTS = 4  # of a row whose tokens are all copied


def hand_over(
    kv: list[Any], states: list[Any], state_row: int, length: int, start: int, end: int, window: int | None
) -> Captured:
    """Capture a row that leaves. `kv` is emptied: layers are freed once they are copied.

    At most a quarter of the row's KV is held twice, or one layer if that is more.
    """
    share = (end - start) / min(length, window or length)  # the copied part of a layer, at most
    most = layers.state_bytes(kv) / max(1, min(_MOST_PARTS, math.ceil(_MOST_PARTS * share)))
    parts = [snapshot.capture(snapshot.view(_take(kv, most), 0, states, state_row, length), start, end, window)]
    while kv:
        parts.append(snapshot.capture(snapshot.view(_take(kv, most), 0, (), 0, length), start, end, window))
    segments, window_starts, found = zip(*parts, strict=True)
    held = [state for state in found if state is not None]
    return KVSegment.joined(segments), window_starts[0], RecurrentState.joined(held) if held else None


def _take(kv: list[Any], most: float) -> list[Any]:
    """Take the first layers off the list: at least one, and more if together they have at most `most` bytes."""
    sizes = accumulate(layers.state_bytes([leaf]) for leaf in kv)
    num_taken = max(1, sum(size <= most for size in sizes))
    taken, kv[:num_taken] = kv[:num_taken], []
    return taken
