"""The only file that knows the libraries' cache classes: their contents, and how rows join and leave a batch cache.

mlx-lm and mlx-vlm have classes of the same names, with the same fields. A row's state is a list with one cache object
per layer, all from one library. Some hold KV: rows that share a batch cache are padded on the left. Others hold
recurrent states, which have no length, so that those of any rows can lie in one array.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum, auto
from typing import Any

import mlx.core as mx

from ..core.memory import allocated_slots
from . import whole

LayerCaches = list[Any]
SLICE_BYTES = 256 << 20  # bytes that are copied in one evaluation; not measured on a Mac

_LIBRARIES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")  # by name, so that neither is imported unless it is used


class Kind(Enum):
    """The kind of state in a cache object. OTHER cannot be divided by tokens or by rows, and is copied whole."""

    ATTENTION = auto()
    WINDOW = auto()
    CHUNKED = auto()  # Llama 4: KV of at most a chunk; a token attends to its own chunk. Rows cannot share a batch
    RECURRENT = auto()  # the same class holds one row or several
    BATCHED_ATTENTION = auto()
    BATCHED_WINDOW = auto()
    OTHER = auto()


_KINDS = {
    "KVCache": Kind.ATTENTION,
    "RotatingKVCache": Kind.WINDOW,
    "ChunkedKVCache": Kind.CHUNKED,
    "ArraysCache": Kind.RECURRENT,
    "BatchKVCache": Kind.BATCHED_ATTENTION,
    "BatchRotatingKVCache": Kind.BATCHED_WINDOW,
}
# mlx-vlm's Unlimited-OCR: once its ring has got a token alone, it treats all later tokens as those of a reply.
HISTORIES = frozenset({"RingSlidingKVCache"})
_BATCHABLE = (Kind.ATTENTION, Kind.WINDOW, Kind.RECURRENT)


def kind(cache: Any) -> Kind:
    """Return the kind of a cache object. A subclass of a known class is OTHER, because it may keep more.

    So is a window that keeps its first tokens.
    """
    cls = type(cache)
    found = _KINDS.get(cls.__name__, Kind.OTHER) if cls.__module__ in _LIBRARIES else Kind.OTHER
    return Kind.OTHER if found is Kind.WINDOW and cache.keep else found


def leaves(caches: Iterable[Any]) -> list[Any]:
    """Return the cache objects that hold arrays, including those inside a CacheList."""
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if _is_list(cache) else [cache]
    return found


def is_recurrent(leaf: Any) -> bool:
    return kind(leaf) is Kind.RECURRENT


def is_window(leaf: Any) -> bool:
    """Return whether the layer holds KV of the last tokens only."""
    return kind(leaf) in (Kind.WINDOW, Kind.CHUNKED, Kind.BATCHED_WINDOW)


def window_of(leaf: Any) -> int:
    """Return the most tokens that a later token attends to in such a layer."""
    return int(leaf.chunk_size if kind(leaf) is Kind.CHUNKED else leaf.max_size)


def copied_whole(caches: Iterable[Any]) -> list[Any]:
    """Return the cache objects whose state can only be copied as a whole."""
    return [leaf for leaf in leaves(caches) if kind(leaf) is Kind.OTHER]


def split(caches: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the cache objects that hold KV, and those that hold recurrent states, each in the order of the layers."""
    found = leaves(caches)
    return [leaf for leaf in found if not is_recurrent(leaf)], [leaf for leaf in found if is_recurrent(leaf)]


def assemble(structure: Iterable[Any], kv: Iterable[Any], states: Iterable[Any]) -> LayerCaches:
    """Make one cache per layer, as a model takes them: `structure` with these objects instead of its own."""
    caches, kv, states = [], iter(kv), iter(states)
    for cache in structure:
        if _is_list(cache):
            children = copy(cache)
            children.caches = tuple(assemble(cache.caches, kv, states))
            caches.append(children)
        else:
            caches.append(next(states if is_recurrent(cache) else kv))
    return caches


def gather(sources: Sequence[tuple[Sequence[Any], int, int]]) -> list[Any]:
    """Gather the recurrent states of the rows `[start, end)` of each source, in order. The copies are lazy.

    The states of a row that has computed nothing are zeros, with which the libraries' layers begin.
    """
    gathered = []
    for index, first in enumerate(sources[0][0]):
        state = copy(first)
        state.cache = [
            _gather_rows([(states[index].cache[place], start, end) for states, start, end in sources])
            for place in range(len(first.cache))
        ]
        gathered.append(state)
    return gathered


def _gather_rows(parts: Sequence[tuple[mx.array | None, int, int]]) -> mx.array | None:
    like = next((array for array, _, _ in parts if array is not None), None)
    if like is None:
        return None
    arrays = [
        mx.zeros((end - start, *like.shape[1:]), like.dtype) if array is None else array[start:end]
        for array, start, end in parts
    ]
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def _is_list(cache: Any) -> bool:
    return any(cls.__name__ == "CacheList" and cls.__module__ in _LIBRARIES for cls in type(cache).__mro__)


def can_batch(caches: Iterable[Any]) -> bool:
    """Return whether rows with such state can share a batch cache. Rows with chunked or unknown caches decode alone."""
    return all(kind(leaf) in _BATCHABLE for leaf in leaves(caches))


def arrays(value: Any) -> list[mx.array]:
    """Return all arrays in a cache's state, at any depth of nesting. Other values are skipped."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in arrays(item)]
    return []


def state_arrays(caches: Iterable[Any]) -> list[mx.array]:
    """Return all arrays that the cache objects hold, in the order of the layers."""
    return [array for leaf in leaves(caches) for array in _held(leaf)]


def _held(leaf: Any) -> list[mx.array]:
    return whole.arrays(leaf) if kind(leaf) in (Kind.CHUNKED, Kind.OTHER) else arrays(leaf.state)


def complete(*work: Any) -> None:
    """Evaluate arrays, and wait until MLX knows whether this and all earlier work of the thread succeeded.

    Raises RuntimeError if it did not. An evaluation alone may return before the error is known
    (mlx/backend/metal/event.cpp).
    """
    mx.eval(*work)
    mx.synchronize()


def state_bytes(caches: Iterable[Any]) -> int:
    """Return bytes by shape and type: exact for lazy arrays too, and without evaluating them."""
    return sum(array.nbytes for array in state_arrays(caches))


@contextmanager
def reserving(caches: Iterable[Any], num_tokens: int) -> Iterator[None]:
    """Let layers that grow with every token allocate their first buffer for `num_tokens` within this context.

    So later chunks are written in place. Sliding windows never hold that many tokens.
    """
    growing = [leaf for leaf in leaves(caches) if kind(leaf) is Kind.ATTENTION]
    for leaf in growing:
        leaf.step = allocated_slots(num_tokens)
    try:
        yield
    finally:
        for leaf in growing:
            del leaf.step  # the class has the usual one


def leave_window(caches: Iterable[Any]) -> None:
    """Cut sliding-window layers back to the window, because a prefill chunk leaves more tokens in them."""
    for leaf in leaves(caches):
        if kind(leaf) not in (Kind.WINDOW, Kind.CHUNKED) or leaf.keys is None:
            continue
        is_chunked = kind(leaf) is Kind.CHUNKED
        end = leaf.offset - leaf.start_position if is_chunked else leaf.keys.shape[2]
        excess = end - window_of(leaf)
        if excess > 0:  # after a chunk, the tokens are in order
            leaf.keys, leaf.values = (mx.contiguous(a[:, :, excess:end]) for a in (leaf.keys, leaf.values))
            if is_chunked:
                leaf.start_position += excess
            else:
                leaf._idx = leaf.max_size


def verifies(caches: Iterable[Any]) -> bool:
    """Return whether a row's last tokens can be undone: mlx-vlm's recurrent layers record the state at each token."""
    return all(
        kind(leaf) in (Kind.ATTENTION, Kind.WINDOW) or (is_recurrent(leaf) and hasattr(leaf, "start_speculation"))
        for leaf in leaves(caches)
    )


def take_back(kv: Iterable[Any], num_tokens: int) -> None:
    """Take the last tokens of one row back, all of which were added by its last forward pass, but not alone.

    Such a pass leaves a window in order, so that it can be cut at its end. No array of another layer is touched.
    """
    for leaf in kv if num_tokens else ():
        leaf.offset -= num_tokens
        if kind(leaf) is Kind.WINDOW:
            leaf._idx -= num_tokens
            leaf.keys, leaf.values = (array[:, :, : leaf._idx] for array in (leaf.keys, leaf.values))


def length_counters(kv: Iterable[Any]) -> list[Any]:
    """Return the batch caches, which count the lengths of their rows in an array."""
    return [leaf for leaf in kv if kind(leaf) in (Kind.BATCHED_ATTENTION, Kind.BATCHED_WINDOW)]


def set_lengths(counters: Iterable[Any], lengths: Sequence[int]) -> None:
    """Give batch caches the lengths of their rows as evaluated numbers.

    The libraries count them by one operation a step. A layer without rotary embedding never evaluates these
    operations, each of which keeps a buffer. mlx-vlm counts in place, so every layer gets its own array.
    """
    counted = mx.array(list(lengths))
    for counter in counters:
        counter.offset = copy(counted)


def tokens(leaf: Any, length: int) -> tuple[mx.array, mx.array]:
    """Keys and values of the last `length` tokens of all rows, oldest first. A window holds no more than its size.

    The arrays are lazy views where that is possible. Shorter rows of a batch are padded on the left.
    """
    match kind(leaf):
        case Kind.ATTENTION:
            return leaf.keys[..., :length, :], leaf.values[..., :length, :]
        case Kind.BATCHED_ATTENTION:
            start = leaf._idx - length
            return leaf.keys[..., start : leaf._idx, :], leaf.values[..., start : leaf._idx, :]
        case Kind.CHUNKED:
            held = leaf.offset - leaf.start_position
            ordered = (leaf.keys[..., :held, :], leaf.values[..., :held, :])
        case Kind.WINDOW:
            ordered = (leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values))
        case Kind.BATCHED_WINDOW if leaf.rotated:
            ordered = (mx.roll(leaf.keys, -leaf._idx, 2), mx.roll(leaf.values, -leaf._idx, 2))
        case Kind.BATCHED_WINDOW:
            ordered = (leaf.keys[..., : leaf._idx, :], leaf.values[..., : leaf._idx, :])
        case _:
            raise TypeError(f"{type(leaf).__name__} holds no tokens")
    start = ordered[0].shape[2] - min(length, window_of(leaf))
    return ordered[0][:, :, start:], ordered[1][:, :, start:]


def merge(sources: Sequence[tuple[list[Any], Sequence[int]]]) -> list[Any]:
    """Build one batch cache per layer from KV of one row or of several, whose lists are emptied.

    `sources` are KV and the lengths of its rows. Few layers are evaluated at a time, and each is freed once copied.
    """
    merged: list[Any] = []
    slices = Slices(mx.eval)
    for index in range(len(sources[0][0])):
        parts = []
        for kv, lengths in sources:
            parts.append((kv[index], lengths))
            kv[index] = None
        merged.append(_merge_layer(parts))
        del parts
        slices.add(state_arrays(merged[-1:]))
    slices.finish()
    return merged


def _merge_layer(parts: Sequence[tuple[Any, Sequence[int]]]) -> Any:
    first = parts[0][0]
    slides = is_window(first)
    most = first.max_size if slides else None
    held = [min(length, most or length) for _, lengths in parts for length in lengths]
    width = max(held)
    padding = [width - length for length in held]
    batch = _new(first, "BatchRotatingKVCache", most, padding) if slides else _new(first, "BatchKVCache", padding)
    if width:
        slots = width if slides else allocated_slots(width + 1)
        batch.keys, batch.values = (_join_rows(parts, side, width, slots) for side in (0, 1))
    batch.offset = mx.array([length for _, lengths in parts for length in lengths])
    batch._idx = width
    if slides:
        batch._offset = width
    return batch


def _join_rows(parts: Sequence[tuple[Any, Sequence[int]]], side: int, width: int, slots: int) -> mx.array:
    """Keys or values of all rows in one buffer, whose rows end at `width`."""
    filled = [(tokens(leaf, max(lengths))[side] if max(lengths) else None, len(lengths)) for leaf, lengths in parts]
    like = next(array for array, _ in filled if array is not None)
    joined = mx.zeros((sum(rows for _, rows in filled), like.shape[1], slots, like.shape[3]), like.dtype)
    row = 0
    for array, rows in filled:
        if array is not None:
            joined[row : row + rows, :, width - array.shape[2] : width] = array
        row += rows
    return joined


def keep(kv: list[Any], indices: Sequence[int], lengths: Sequence[int]) -> None:
    """Keep only the rows at `indices` of batch caches, in this order, which have `lengths`. One row needs no batch."""
    chosen, longest = mx.array(list(indices)), max(lengths)
    slices = Slices(mx.eval)
    for place, leaf in enumerate(kv):
        if len(indices) == 1:
            kv[place] = leaf = _single(leaf, indices[0], longest)
        elif kind(leaf) is Kind.BATCHED_ATTENTION:  # the library's method waits for the device to learn the padding
            start = leaf._idx - longest
            leaf.keys, leaf.values = (array[:, :, start:][chosen] for array in (leaf.keys, leaf.values))
            leaf.offset, leaf.left_padding = mx.array(list(lengths)), mx.array([longest - length for length in lengths])
            leaf._idx = longest
        else:
            leaf.filter(chosen)
        slices.add(state_arrays([leaf]))
    slices.finish()


def extract(kv: Sequence[Any], index: int, length: int) -> list[Any]:
    """Copy one row, of `length` tokens, out of batch caches."""
    row = []
    slices = Slices(mx.eval)
    for leaf in kv:
        row.append(_single(leaf, index, length))
        slices.add((row[-1].keys, row[-1].values))
    slices.finish()
    return row


def _single(leaf: Any, index: int, length: int) -> Any:
    """Return a lazy copy of one row, of `length` tokens, of a batch cache."""
    slides = is_window(leaf)
    single = _new(leaf, "RotatingKVCache", leaf.max_size) if slides else _new(leaf, "KVCache")
    single.keys, single.values = (mx.contiguous(array[index : index + 1]) for array in tokens(leaf, length))
    single.offset = length
    if slides:
        single._idx = single.keys.shape[2]
    return single


def _new(like: Any, name: str, *arguments: Any) -> Any:
    """Return a cache object of another class of the same library."""
    return getattr(sys.modules[type(like).__module__], name)(*arguments)


class Slices:
    """Evaluates arrays whenever enough bytes have been added, so that no evaluation copies much more than a slice.

    One long command buffer can exceed Metal's time limit, and the source of a copy is freed only once it is evaluated.
    """

    def __init__(self, evaluate: Callable[[list[mx.array]], None] = complete) -> None:
        self._evaluate = evaluate
        self._arrays: list[mx.array] = []
        self._num_bytes = 0

    def add(self, arrays: Iterable[mx.array]) -> None:
        for array in arrays:
            self._arrays.append(array)
            self._num_bytes += array.nbytes
        if self._num_bytes >= SLICE_BYTES:
            self.finish()

    def finish(self) -> None:
        self._evaluate(self._arrays)
        self._arrays, self._num_bytes = [], 0
