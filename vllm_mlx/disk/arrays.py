"""Cached state as tensors of records on disk, and back. It knows arrays and their layout, but no tree and no files.

A run's KV is cut into slabs of at most `SLAB_TOKENS` tokens, in the order of the tokens. So a resume
point is read without the tokens that follow it, except the rest of its last slab.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.layers import Slices
from ..cache.snapshot import Block, KVSegment, RecurrentState, Stack, overlapping
from .record import Record, Tensor, TensorData

SLAB_TOKENS = 256
_PLACES = {"kv": "places", "window": "window_places"}  # where a run's layout has the places of its tensors
Key = tuple[str, int]  # a record's name and the index of one of its tensors

# The name of an array's type in a row, and the type of NumPy that carries its bits.
_NAMES: dict[mx.Dtype, tuple[str, Any]] = {
    mx.bfloat16: ("BF16", np.uint16),
    mx.float16: ("F16", np.uint16),
    mx.float32: ("F32", np.uint32),
    mx.uint8: ("U8", np.uint8),
    mx.int8: ("I8", np.uint8),
    mx.bool_: ("BOOL", np.uint8),
    mx.uint16: ("U16", np.uint16),
    mx.int16: ("I16", np.uint16),
    mx.uint32: ("U32", np.uint32),
    mx.int32: ("I32", np.uint32),
    mx.uint64: ("U64", np.uint64),
    mx.int64: ("I64", np.uint64),
}
_DTYPES = {name: dtype for dtype, (name, _) in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class _Slab:
    """KV of the next `length` tokens, at most `SLAB_TOKENS`: a range of tokens in arrays of shape (rows, heads, tokens,
    width), which follow the places of their stack."""

    stack: Stack
    start: int
    length: int


def _slabs(stack: Stack, start: int, end: int) -> Iterator[_Slab]:
    for low in range(start, end, SLAB_TOKENS):
        yield _Slab(stack, low, min(SLAB_TOKENS, end - low))


def run_tensors(segment: KVSegment, start: int, end: int, windowed: int) -> tuple[dict[str, Any], list[TensorData]]:
    """Return the layout and the tensors of a segment's tokens `[start, end)`; of window layers, from `windowed` on.

    The bytes are copied when they are written, a tensor at a time.
    """
    slabs = [slab for block, (low, high) in segment.spans(start, end) for slab in _slabs(block.kv, low, high)]
    windows: list[_Slab] = []
    if segment.windows.buffers:
        windows = [*_slabs(segment.windows, windowed - segment.window_offset, end - segment.window_offset)]
    layout = {"slabs": [slab.length for slab in slabs], "window_offset": windowed - start}
    layout |= {"window_slabs": [slab.length for slab in windows]}
    layout |= {"places": _places(slabs), "window_places": _places(windows)}
    return layout, [*_slab_tensors("kv", slabs), *_slab_tensors("window", windows)]


def _places(slabs: Sequence[_Slab]) -> list[Any]:
    places = {slab.stack.alike()[1] for slab in slabs}
    assert len(places) <= 1, "the blocks of one run have the same layers"
    return [place and list(place) for place in next(iter(places), ())]


def _slab_tensors(name: str, slabs: Iterable[_Slab]) -> Iterator[TensorData]:
    for index, slab in enumerate(slabs):
        for number, buffers in enumerate(slab.stack.alike()[0]):
            _, heads, _, width = buffers[0].shape
            bits = [_bits(buffer)[:, :, slab.start : slab.start + slab.length] for buffer in buffers]
            shape = (sum(buffer.shape[0] for buffer in buffers), heads, slab.length, width)
            yield f"{name}.{index}.{number}", _NAMES[buffers[0].dtype][0], shape, map(copied, bits)


def state_tensors(state: RecurrentState) -> tuple[dict[str, Any], list[TensorData]]:
    """Return the layout and the tensors of a state."""
    layout = {
        "places": [place and list(place) for place in state.arrays.places],
        "widths": list(state.widths),
        "fields": list(state.fields),
    }
    tensors: list[TensorData] = [
        (f"state.{number}", _NAMES[buffer.dtype][0], tuple(buffer.shape), map(copied, [_bits(buffer)]))
        for number, buffer in enumerate(state.arrays.buffers)
    ]
    return layout, tensors


def _bits(buffer: mx.array) -> np.ndarray:
    """View an evaluated array as whole numbers of its width. The view keeps the array alive, and copies nothing."""
    bits: np.ndarray = np.frombuffer(memoryview(buffer), dtype=_NAMES[buffer.dtype][1])  # type: ignore[arg-type]
    return bits.reshape(buffer.shape)


def copied(bits: np.ndarray) -> memoryview:
    """Copy the bytes of a part of a tensor."""
    return np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data


def empty_arrays(tensors: Sequence[Tensor]) -> list[tuple[mx.array, memoryview]]:
    """Make arrays for tensors that are to be read. Each comes with its own bytes, which a read fills.

    Called on the engine thread.
    """
    arrays = [mx.zeros(tensor.shape, _DTYPES[tensor.dtype]) for tensor in tensors]
    mx.eval(arrays)
    return [(array, _bytes(array)) for array in arrays]


def _bytes(array: mx.array) -> memoryview:
    if not array.size:
        return memoryview(b"")
    return np.frombuffer(memoryview(array), np.uint8).data  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one record that are read, counted from its first token. `windows` is the range with window KV."""

    record: Record
    start: int
    end: int
    windows: tuple[int, int]

    def tensors(self) -> Iterator[Key]:
        """Yield the tensors to read, in the order of the file."""
        for name in _PLACES:
            for index, _ in self._spans(name):
                yield from self._keys(name, index)

    def blocks(self, arrays: Mapping[Key, mx.array]) -> Iterator[Block]:
        """Yield the attention KV. Slabs that are used in part are copied lazily."""
        for index, (low, high) in self._spans("kv"):
            yield Block(self.record.header.layout["slabs"][index], self._stack("kv", index, arrays)).cut(low, high)

    def window_kv(self, arrays: Mapping[Key, mx.array]) -> Iterator[Stack]:
        """Yield the KV of window layers, slab by slab."""
        for index, (low, high) in self._spans("window"):
            yield self._stack("window", index, arrays).cut(low, high)

    def _spans(self, name: str) -> Iterator[tuple[int, tuple[int, int]]]:
        """Return the slabs that are read, each with the range of its tokens."""
        layout = self.record.header.layout
        if name == "kv":
            return overlapping(layout["slabs"], self.start, self.end)
        return overlapping(layout["window_slabs"], *(at - layout["window_offset"] for at in self.windows))

    def _keys(self, name: str, index: int) -> list[Key]:
        """Return the tensors of one slab."""
        places = self.record.header.layout[_PLACES[name]]
        num_buffers = 1 + max((place[0] for place in places if place is not None), default=-1)
        by_name = {tensor.name: place for place, tensor in enumerate(self.record.tensors)}
        return [(self.record.name, by_name[f"{name}.{index}.{number}"]) for number in range(num_buffers)]

    def _stack(self, name: str, index: int, arrays: Mapping[Key, mx.array]) -> Stack:
        buffers = tuple(arrays[key] for key in self._keys(name, index))
        return Stack(buffers, _as_places(self.record.header.layout[_PLACES[name]]))


def segment_of(parts: Sequence[Part], arrays: Mapping[Key, mx.array]) -> KVSegment:
    """Join the KV of successive parts. Window layers begin at the first part that has KV of them."""
    blocks = tuple(block for part in parts for block in part.blocks(arrays))
    stacks = [stack for part in parts for stack in part.window_kv(arrays)]
    length = sum(part.end - part.start for part in parts)
    num_windowed = sum(part.windows[1] - part.windows[0] for part in parts)
    slices = Slices()
    windows = _joined(stacks)
    for stack in (*(block.kv for block in blocks), windows):
        slices.add(stack.buffers)
    slices.finish()
    return KVSegment(length, blocks, windows, length - num_windowed)


def state_of(record: Record, arrays: Mapping[Key, mx.array]) -> RecurrentState:
    layout = record.header.layout
    buffers = tuple(arrays[record.name, index] for index in range(len(record.tensors)))
    slices = Slices()
    slices.add(buffers)
    slices.finish()
    stack = Stack(buffers, _as_places(layout["places"]))
    return RecurrentState(stack, tuple(layout["widths"]), tuple(layout["fields"]))


def _joined(stacks: Sequence[Stack]) -> Stack:
    """Join the tokens of all stacks, one after the other, in new buffers."""
    if not stacks:
        return Stack((), ())
    columns = zip(*(stack.buffers for stack in stacks), strict=True)
    return Stack(tuple(mx.concatenate(list(column), axis=2) for column in columns), stacks[0].places)


def _as_places(places: Iterable[Any]) -> tuple[tuple[int, int] | None, ...]:
    return tuple(None if place is None else (place[0], place[1]) for place in places)
