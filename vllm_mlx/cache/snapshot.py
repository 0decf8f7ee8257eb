"""Copies of a row's state, detached from its buffers, and rows started from such copies. It knows no tree and no model.

Attention KV is copied once per token and joined again at restore. Sliding-window KV is copied only where a later resume
point can need it. Recurrent state is copied completely, at one position. Cost: a capture copies its own tokens, and a
restore copies all tokens up to the resume point, both at `RowFootprint.bytes_per_token`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import mlx.core as mx

from ..core.memory import allocated_slots
from .layers import Kind, LayerCaches, can_batch, complete, kind, leaves, state_arrays
from .node import ResumeRule

BLOCK_TOKENS = 1024  # tokens of one block of attention KV
KV = tuple[mx.array, mx.array]  # keys, values: (1, heads, tokens, width)


class DamagedSnapshot(Exception):
    """Stored state is inconsistent; its entry must be removed."""


@dataclass(frozen=True, slots=True)
class Block:
    """Attention KV of successive tokens, one pair of arrays per layer."""

    length: int
    attention: tuple[KV, ...]

    def cut(self, start: int, end: int) -> "Block":
        if (start, end) == (0, self.length):
            return self
        return Block(end - start, _cut(self.attention, start, end))


@dataclass(frozen=True, slots=True)
class KVSegment:
    """KV of a run of tokens: attention layers for all tokens, in blocks; window layers from `window_offset` on.

    Blocks make a split cheap: it copies one block, and the window.
    """

    length: int
    blocks: tuple[Block, ...]
    windows: tuple[KV, ...]
    window_offset: int  # tokens from the segment's start

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def split(self, at: int) -> tuple["KVSegment", "KVSegment"]:
        cut = min(max(at - self.window_offset, 0), self.length - self.window_offset)
        num_windowed = self.length - self.window_offset
        left = KVSegment(at, self._blocks(0, at), _cut(self.windows, 0, cut), min(self.window_offset, at))
        right = KVSegment(
            self.length - at,
            self._blocks(at, self.length),
            _cut(self.windows, cut, num_windowed),
            max(self.window_offset - at, 0),
        )
        complete(*left.arrays(), *right.arrays())  # a lazy copy would keep its source alive
        return left, right

    def arrays(self) -> list[mx.array]:
        attention = (kv for block in self.blocks for kv in block.attention)
        return [array for kv in (*attention, *self.windows) for array in kv]

    def attention(self, layer: int, num_tokens: int) -> list[KV]:
        """One attention layer's KV of the first `num_tokens`, as a list of parts."""
        return [_cut_one(block.attention[layer], *span) for block, span in self._spans(0, num_tokens)]

    def _blocks(self, start: int, end: int) -> tuple[Block, ...]:
        return tuple(block.cut(*span) for block, span in self._spans(start, end))

    def _spans(self, start: int, end: int) -> list[tuple[Block, tuple[int, int]]]:
        """The blocks that overlap `[start, end)`, each with the range inside the block that overlaps."""
        spans, position = [], 0
        for block in self.blocks:
            low, high = max(start - position, 0), min(end - position, block.length)
            if low < high:
                spans.append((block, (low, high)))
            position += block.length
        return spans


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """State of all recurrent layers at one position: a tuple of arrays per layer."""

    layers: tuple[tuple[mx.array | None, ...], ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in layer if array is not None)


class StoredPiece(Protocol):
    """One run of a stored path, which begins at `start` and of which the first `take` tokens are used."""

    segment: Any
    start: int
    window_start: int
    take: int


def resume_rule(caches: Iterable[Any]) -> ResumeRule | None:
    """The strictest rule of all layers. None if a layer's state cannot be divided by tokens: nothing is cached."""
    found = leaves(caches)
    if not can_batch(found):  # the same classes can be divided by rows and by tokens
        return None
    windows = [leaf for leaf in found if kind(leaf) is Kind.WINDOW]
    if any(leaf.keep for leaf in windows):
        return None
    return ResumeRule(
        needs_state=any(kind(leaf) is Kind.RECURRENT for leaf in found),
        window=max((leaf.max_size for leaf in windows), default=None),
    )


@dataclass(frozen=True, slots=True)
class RowView:
    """One row's layers, in caches of its own or in a batch. The arrays are lazy: nothing is copied yet."""

    attention: tuple[KV, ...]  # tokens [0, length)
    windows: tuple[KV, ...]  # the last tokens, as many as the layer holds
    recurrent: tuple[tuple[mx.array | None, ...], ...]


def view(caches: LayerCaches, row: int, length: int) -> RowView:
    """View one row, of `length` tokens. Caches of a single row have only row 0."""
    attention, windows, recurrent = [], [], []
    for leaf in leaves(caches):
        match kind(leaf):
            case Kind.ATTENTION:
                attention.append((leaf.keys[..., :length, :], leaf.values[..., :length, :]))
            case Kind.BATCHED_ATTENTION:
                pad = leaf.size() - length
                picked = (array[row : row + 1, :, pad : pad + length] for array in (leaf.keys, leaf.values))
                attention.append(tuple(picked))
            case Kind.WINDOW:
                windows.append((leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values)))
            case Kind.BATCHED_WINDOW:
                single = leaf.extract(row)
                windows.append((single.keys, single.values))
            case Kind.RECURRENT:
                recurrent.append(tuple(None if a is None else a[row : row + 1] for a in leaf.cache))
            case _:
                raise TypeError(f"{type(leaf).__name__} cannot be captured")
    return RowView(tuple(attention), tuple(windows), tuple(recurrent))


def capture(row: RowView, start: int, end: int, window: int | None) -> tuple[KVSegment, int, RecurrentState | None]:
    """Copy the KV of `[start, end)` and the recurrent state at `end`, which is the row's length.

    Returns the segment, the position from which it holds window layers, and the state.
    """
    window_start = start if window is None else max(start, end - window)
    edges = [*range(start, end, BLOCK_TOKENS), end]
    blocks = tuple(Block(high - low, _cut(row.attention, low, high)) for low, high in pairwise(edges))
    windows = tuple(_tail(kv, end - window_start) for kv in row.windows)
    recurrent = tuple(tuple(_own(a) for a in layer) for layer in row.recurrent)
    segment = KVSegment(end - start, blocks, windows, window_start - start)
    complete(segment.arrays(), [array for layer in recurrent for array in layer if array is not None])
    return segment, window_start, RecurrentState(recurrent) if recurrent else None


def restore(
    caches: LayerCaches, pieces: Sequence[StoredPiece], state: RecurrentState | None, *, length: int, capacity: int
) -> None:
    """Fill a new row's caches with the first `length` tokens of the pieces, in buffers with room for `capacity` tokens.

    Raises DamagedSnapshot, after which the caches are unusable.
    """
    _check_layers(caches, pieces, state)
    attention = window = recurrent = 0
    for leaf in leaves(caches):
        match kind(leaf):
            case Kind.ATTENTION:
                parts = [part for piece in pieces for part in piece.segment.attention(attention, piece.take)]
                leaf.keys, leaf.values = (_join(parts, side, allocated_slots(capacity)) for side in (0, 1))
                _check(sum(part[0].shape[2] for part in parts) == length, "attention KV is incomplete")
                leaf.offset = length
                attention += 1
            case Kind.WINDOW:
                _restore_window(leaf, pieces, window, length)
                window += 1
            case Kind.RECURRENT:
                assert state is not None, "checked"
                leaf.cache = list(state.layers[recurrent])
                _check(all(a is None or a.shape[0] == 1 for a in leaf.cache), "recurrent state is not of one row")
                recurrent += 1
            case _:
                raise TypeError(f"{type(leaf).__name__} cannot be restored")
    complete(state_arrays(caches))


def _check_layers(caches: LayerCaches, pieces: Sequence[StoredPiece], state: RecurrentState | None) -> None:
    """Check that the stored state has as many layers of each kind as the model."""
    kinds = [kind(leaf) for leaf in leaves(caches)]
    num_recurrent = kinds.count(Kind.RECURRENT)
    _check(num_recurrent == (0 if state is None else len(state.layers)), "recurrent state is missing")
    for piece in pieces:
        num_attention = kinds.count(Kind.ATTENTION)
        _check(
            all(len(block.attention) == num_attention for block in piece.segment.blocks),
            "attention layers are missing",
        )
        _check(len(piece.segment.windows) == kinds.count(Kind.WINDOW), "window layers are missing")


def _restore_window(leaf: Any, pieces: Sequence[StoredPiece], index: int, length: int) -> None:
    first = max(0, length - leaf.max_size)
    parts = []
    for piece in pieces:
        end = piece.start + piece.take
        begin = max(first, piece.window_start)
        if begin < end:
            parts.append(_cut_one(piece.segment.windows[index], begin - piece.window_start, end - piece.window_start))
    held = sum(keys.shape[2] for keys, _ in parts)
    _check(held == length - first, "a sliding window is incomplete")
    leaf.keys, leaf.values = (_join(parts, side, held) for side in (0, 1))
    leaf.offset, leaf._idx = length, held


def _join(parts: Sequence[KV], side: int, slots: int) -> mx.array:
    arrays = [part[side] for part in parts]
    _check(bool(arrays), "KV is missing")
    held = sum(array.shape[2] for array in arrays)
    _check(all(array.shape[0] == 1 for array in arrays), "KV is not of one row")
    if slots > held:
        _, heads, _, width = arrays[0].shape
        arrays.append(mx.zeros((1, heads, slots - held, width), arrays[0].dtype))
    return mx.concatenate(arrays, axis=2)


def _cut(kvs: Iterable[KV], start: int, end: int) -> tuple[KV, ...]:
    return tuple((_own(keys[:, :, start:end]), _own(values[:, :, start:end])) for keys, values in kvs)


def _cut_one(kv: KV, start: int, end: int) -> KV:
    return kv[0][:, :, start:end], kv[1][:, :, start:end]


def _tail(kv: KV, num_tokens: int) -> KV:
    keys, values = kv
    held = keys.shape[2]
    return _own(keys[:, :, held - num_tokens :]), _own(values[:, :, held - num_tokens :])


def _own(array: mx.array | None) -> Any:
    """Copy into a buffer of its own, because a slice would keep the row's buffer alive."""
    return None if array is None else mx.contiguous(array)


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise DamagedSnapshot(what)
