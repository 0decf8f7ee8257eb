"""Copies a row's state, detached from its buffers, and starts rows from such copies. It knows neither tree nor model.

Attention KV is copied once per token and joined again at restore. Sliding-window KV is copied only where a later resume
point can need it. Recurrent state is copied completely, at one position, and so is the state of an unknown class. A
capture copies its own tokens, and a restore all tokens up to the resume point, both at `RowFootprint.bytes_per_token`.

Arrays of all layers that are alike share one buffer, because Metal limits the number of live buffers. Large copies are
evaluated in slices, because one long command buffer can exceed Metal's time limit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ..core.memory import allocated_slots
from . import layers, whole
from .layers import Kind, LayerCaches, Slices, complete, kind, leaves, state_arrays
from .node import Piece, ResumeRule

STATE_VERSION = 1  # raise it when the captured state of a row changes, so that old records on disk are not used
BLOCK_TOKENS = 1024  # tokens of one block of attention KV
KV = tuple[mx.array, mx.array]  # keys, values: (1, heads, tokens, width)


class DamagedSnapshot(Exception):
    """Stored state is inconsistent. Its entry must be removed."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Arrays of shape (1, ...) in few buffers: those of equal shape and type follow each other in one buffer."""

    buffers: tuple[mx.array, ...]
    places: tuple[tuple[int, int] | None, ...]  # each array's buffer and its index there; None if there is no array

    @classmethod
    def of(cls, arrays: Iterable[mx.array | None]) -> "Stack":
        """Copy the arrays. The result is lazy: the sources stay alive until it is evaluated."""
        groups: dict[Any, list[mx.array]] = {}
        places: list[tuple[int, int] | None] = []
        for array in arrays:
            if array is None:
                places.append(None)
                continue
            _check(array.shape[0] == 1, "the state is not of one row")
            key = (array.shape, array.dtype)
            group = groups.setdefault(key, [])
            places.append((list(groups).index(key), len(group)))
            group.append(array)
        return cls(tuple(_stack(group) for group in groups.values()), tuple(places))

    @classmethod
    def joined(cls, stacks: Iterable["Stack"]) -> "Stack":
        """Return the arrays of all stacks, one stack after the other, in their present buffers."""
        buffers: list[mx.array] = []
        places: list[tuple[int, int] | None] = []
        for stack in stacks:
            places += [place and (len(buffers) + place[0], place[1]) for place in stack.places]
            buffers += stack.buffers
        return cls(tuple(buffers), tuple(places))

    def alike(self) -> tuple[list[list[mx.array]], tuple[tuple[int, int] | None, ...]]:
        """Return the buffers grouped by shape, and the places of the arrays if each group were one buffer."""
        groups: dict[Any, list[mx.array]] = {}
        firsts: list[tuple[int, int]] = []  # where each buffer would begin
        for buffer in self.buffers:
            key = (buffer.shape[1:], buffer.dtype)
            group = groups.setdefault(key, [])
            firsts.append((list(groups).index(key), sum(len(other) for other in group)))
            group.append(buffer)
        moved = (place and (firsts[place[0]][0], firsts[place[0]][1] + place[1]) for place in self.places)
        return list(groups.values()), tuple(moved)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> mx.array | None:
        """Return one of the arrays, as a lazy view."""
        if (place := self.places[index]) is None:
            return None
        buffer, row = place
        return self.buffers[buffer][row : row + 1]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def cut(self, start: int, end: int) -> "Stack":
        """Return a copy of the tokens `[start, end)` of every array. It is lazy."""
        return Stack(tuple(mx.contiguous(buffer[:, :, start:end]) for buffer in self.buffers), self.places)

    def kv(self, layer: int, start: int, end: int) -> KV:
        """Return the tokens `[start, end)` of a layer's keys and values, as lazy views."""
        keys, values = self[2 * layer], self[2 * layer + 1]
        assert keys is not None and values is not None, "KV has no empty places"
        return keys[:, :, start:end], values[:, :, start:end]


@dataclass(frozen=True, slots=True)
class Block:
    """Attention KV of successive tokens. `kv` holds keys and values of each layer in turn."""

    length: int
    kv: Stack

    def cut(self, start: int, end: int) -> "Block":
        return self if (start, end) == (0, self.length) else Block(end - start, self.kv.cut(start, end))


@dataclass(frozen=True, slots=True)
class KVSegment:
    """KV of a run of tokens: attention layers for all tokens, in blocks; window layers from `window_offset` on.

    Blocks make a split cheap: it copies one block, and the window.
    """

    length: int
    blocks: tuple[Block, ...]
    windows: Stack  # keys and values of each window layer in turn
    window_offset: int  # tokens from the segment's start

    @classmethod
    def joined(cls, parts: Sequence["KVSegment"]) -> "KVSegment":
        """Return the same tokens of all layers. Each part has some of the layers, in their order."""
        rows = zip(*(part.blocks for part in parts), strict=True)
        blocks = tuple(Block(row[0].length, Stack.joined(block.kv for block in row)) for row in rows)
        return replace(parts[0], blocks=blocks, windows=Stack.joined(part.windows for part in parts))

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def num_buffers(self) -> int:
        return sum(buffer.nbytes > 0 for buffer in self.buffers())

    def split(self, at: int) -> tuple["KVSegment", "KVSegment"]:
        cut = min(max(at - self.window_offset, 0), self.length - self.window_offset)
        num_windowed = self.length - self.window_offset
        left = KVSegment(at, self._blocks(0, at), self.windows.cut(0, cut), min(self.window_offset, at))
        right = KVSegment(
            self.length - at,
            self._blocks(at, self.length),
            self.windows.cut(cut, num_windowed),
            max(self.window_offset - at, 0),
        )
        complete(*left.buffers(), *right.buffers())  # a lazy copy would keep its source alive
        return left, right

    def buffers(self) -> list[mx.array]:
        return [buffer for stack in (*(block.kv for block in self.blocks), self.windows) for buffer in stack.buffers]

    def attention(self, layer: int, num_tokens: int) -> list[KV]:
        """Return one attention layer's KV of the first `num_tokens`, as a list of parts."""
        return [block.kv.kv(layer, *span) for block, span in self.spans(0, num_tokens)]

    def _blocks(self, start: int, end: int) -> tuple[Block, ...]:
        return tuple(block.cut(*span) for block, span in self.spans(start, end))

    def spans(self, start: int, end: int) -> list[tuple[Block, tuple[int, int]]]:
        """Return the blocks that overlap `[start, end)`, each with the range inside the block that overlaps."""
        lengths = [block.length for block in self.blocks]
        return [(self.blocks[place], span) for place, span in overlapping(lengths, start, end)]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """State at one position of all layers that cannot be divided by tokens: recurrent ones, then ones copied whole."""

    arrays: Stack  # the arrays of each layer in turn
    widths: tuple[int, ...]  # the number of arrays of each layer
    fields: tuple[whole.Json, ...] = ()  # the values other than arrays of each layer that is copied whole

    @classmethod
    def joined(cls, parts: Sequence["RecurrentState"]) -> "RecurrentState":
        """Return the state of all layers. Each part has some of them, in their order."""
        widths = tuple(width for part in parts for width in part.widths)
        fields = tuple(fields for part in parts for fields in part.fields)
        return cls(Stack.joined(part.arrays for part in parts), widths, fields)

    @property
    def nbytes(self) -> int:
        return self.arrays.nbytes

    @property
    def num_buffers(self) -> int:
        return len(self.arrays.buffers)

    def layer(self, index: int) -> list[mx.array | None]:
        """Return the arrays of one layer, as lazy views of shape (1, ...)."""
        first = sum(self.widths[:index])
        return [self.arrays[place] for place in range(first, first + self.widths[index])]

    def fill(self, index: int, leaf: Any) -> None:
        """Give a new cache object the state of the `index`-th layer that is copied whole, in new arrays."""
        stored = self.layer(len(self.widths) - len(self.fields) + index)
        try:
            whole.put(leaf, [mx.contiguous(array[0]) for array in stored if array is not None], self.fields[index])
        except ValueError as error:
            raise DamagedSnapshot(str(error)) from error


def resume_rule(caches: Iterable[Any]) -> ResumeRule | None:
    """Return the strictest rule of all layers. None if a layer's state cannot be copied; then nothing is cached."""
    found = leaves(caches)
    if copy_fault(found) is not None:
        return None
    return ResumeRule(
        needs_state=any(layers.is_recurrent(leaf) or kind(leaf) is Kind.OTHER for leaf in found),
        window=max((layers.window_of(leaf) for leaf in found if layers.is_window(leaf)), default=None),
    )


def copy_fault(caches: Iterable[Any]) -> str | None:
    """Return the reason why the state of these layers cannot be copied; None if it can."""
    for leaf in layers.copied_whole(caches):
        name = type(leaf).__name__
        if name in layers.HISTORIES:
            return f"which tokens its {name} keeps depends on which of them were computed one at a time"
        try:
            whole.take(leaf)
        except whole.CannotCopy as error:
            return f"its state cannot be copied: {error}"
    return None


@dataclass(frozen=True, slots=True)
class RowView:
    """One row's layers, in separate caches or in a batch. The arrays are lazy: nothing is copied yet."""

    attention: tuple[KV, ...]  # tokens [0, length)
    windows: tuple[KV, ...]  # the last tokens, as many as the layer holds
    recurrent: tuple[tuple[mx.array | None, ...], ...]
    others: tuple[tuple[list[mx.array], whole.Json], ...] = ()  # each layer that is copied whole: its arrays, the rest


def view(kv: Iterable[Any], row: int, states: Iterable[Any], state_row: int, length: int) -> RowView:
    """View one row, of `length` tokens: row `row` of the KV, and row `state_row` of the recurrent states."""
    attention: list[KV] = []
    windows: list[KV] = []
    others = []
    for leaf in kv:
        if kind(leaf) is Kind.OTHER:
            others.append(whole.take(leaf))
            continue
        keys, values = layers.tokens(leaf, length)
        pair = (keys[row : row + 1], values[row : row + 1])
        (windows if layers.is_window(leaf) else attention).append(pair)
    recurrent = (tuple(None if a is None else a[state_row : state_row + 1] for a in leaf.cache) for leaf in states)
    return RowView(tuple(attention), tuple(windows), tuple(recurrent), tuple(others))


Captured = tuple[KVSegment, int, RecurrentState | None]  # the int: from where on the segment holds window layers


def capture(row: RowView, start: int, end: int, window: int | None) -> Captured:
    """Copy the KV of `[start, end)`, and the state that cannot be divided at `end`, which is the row's length then."""
    window_start = start if window is None else max(start, end - window)
    edges = [*range(start, end, BLOCK_TOKENS), end]
    slices = Slices()
    blocks = []
    for low, high in pairwise(edges):
        kv = Stack.of(array[:, :, low:high] for pair in row.attention for array in pair)
        slices.add(kv.buffers)
        blocks.append(Block(high - low, kv))
    windows = Stack.of(_tail(array, end - window_start) for pair in row.windows for array in pair)
    undivided = [*row.recurrent, *([array[None] for array in arrays] for arrays, _ in row.others)]
    state = Stack.of(array for layer in undivided for array in layer)
    slices.add((*windows.buffers, *state.buffers))
    slices.finish()
    segment = KVSegment(end - start, tuple(blocks), windows, window_start - start)
    if not undivided:
        return segment, window_start, None
    widths = tuple(len(layer) for layer in undivided)
    return segment, window_start, RecurrentState(state, widths, tuple(fields for _, fields in row.others))


def restore(
    caches: LayerCaches, pieces: Sequence[Piece], state: RecurrentState | None, *, length: int, capacity: int
) -> None:
    """Fill a new row's caches with the first `length` tokens of the pieces, in buffers with room for `capacity` tokens.

    Raises DamagedSnapshot, after which the caches are unusable.
    """
    _check(sum(piece.take for piece in pieces) == length, "tokens are missing")
    _check_layers(caches, pieces, state)
    attention = window = recurrent = other = 0
    slices = Slices()
    for leaf in leaves(caches):
        match kind(leaf):
            case Kind.ATTENTION:
                parts = [part for piece in pieces for part in piece.segment.attention(attention, piece.take)]
                leaf.keys, leaf.values = (_join(parts, side, allocated_slots(capacity)) for side in (0, 1))
                _check(sum(part[0].shape[2] for part in parts) == length, "attention KV is incomplete")
                leaf.offset = length
                attention += 1
            case Kind.WINDOW | Kind.CHUNKED:
                _restore_window(leaf, pieces, window, length)
                window += 1
            case Kind.RECURRENT:
                assert state is not None, "checked"
                leaf.cache = state.layer(recurrent)
                recurrent += 1
            case Kind.OTHER:
                assert state is not None, "checked"
                state.fill(other, leaf)
                other += 1
            case _:
                raise TypeError(f"{type(leaf).__name__} cannot be restored")
        slices.add(state_arrays([leaf]))
    slices.finish()


def _check_layers(caches: LayerCaches, pieces: Sequence[Piece], state: RecurrentState | None) -> None:
    """Check that the stored state has as many layers of each kind as the model."""
    kinds = [kind(leaf) for leaf in leaves(caches)]
    wanted = kinds.count(Kind.RECURRENT) + kinds.count(Kind.OTHER), kinds.count(Kind.OTHER)
    stored = (0, 0) if state is None else (len(state.widths), len(state.fields))
    _check(wanted == stored, "recurrent or other state is missing")
    num_attention = 2 * kinds.count(Kind.ATTENTION)
    for piece in pieces:
        has_all = all(len(block.kv) == num_attention for block in piece.segment.blocks)
        _check(has_all, "attention layers are missing")
        num_windows = kinds.count(Kind.WINDOW) + kinds.count(Kind.CHUNKED)
        _check(len(piece.segment.windows) == 2 * num_windows, "window layers are missing")


def _restore_window(leaf: Any, pieces: Sequence[Piece], index: int, length: int) -> None:
    first = max(0, length - layers.window_of(leaf))
    parts = []
    for piece in pieces:
        end = piece.start + piece.take
        begin = max(first, piece.window_start)
        if begin < end:
            parts.append(piece.segment.windows.kv(index, begin - piece.window_start, end - piece.window_start))
    held = sum(keys.shape[2] for keys, _ in parts)
    _check(held == length - first, "a sliding window is incomplete")
    leaf.keys, leaf.values = (_join(parts, side, held) for side in (0, 1))
    leaf.offset = length
    if kind(leaf) is Kind.CHUNKED:
        leaf.start_position = first
    else:
        leaf._idx = held


def _join(parts: Sequence[KV], side: int, slots: int) -> mx.array:
    arrays = [part[side] for part in parts]
    _check(bool(arrays), "KV is missing")
    held = sum(array.shape[2] for array in arrays)
    if slots > held:
        _, heads, _, width = arrays[0].shape
        arrays.append(mx.zeros((1, heads, slots - held, width), arrays[0].dtype))
    return mx.concatenate(arrays, axis=2)


def overlapping(lengths: Iterable[int], start: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the places of successive runs that overlap `[start, end)`, each with its range in the run."""
    for place, length in enumerate(lengths):
        low, high = max(start, 0), min(end, length)
        if low < high:
            yield place, (low, high)
        start, end = start - length, end - length


def _stack(arrays: list[mx.array]) -> mx.array:
    """Copy arrays into one new buffer; a view would keep the row's buffer alive."""
    return mx.concatenate(arrays) if len(arrays) > 1 else mx.contiguous(arrays[0])


def _tail(array: mx.array, num_tokens: int) -> mx.array:
    return array[:, :, array.shape[2] - num_tokens :]


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise DamagedSnapshot(what)
