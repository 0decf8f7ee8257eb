"""The one file that knows the libraries' cache classes: what a layer keeps, how rows join a batch cache and leave it.

mlx-lm and mlx-vlm have classes of the same names, with the same fields. A row's state is a list with one cache object
per layer, all from one library. Rows of one batch share batch caches, which are padded on the left.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum, auto
from typing import Any

import mlx.core as mx

from ..core.memory import RowFootprint, allocated_slots

LayerCaches = list[Any]

_LIBRARIES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")  # by name, so that neither is imported unless it is used


class Kind(Enum):
    """What a cache object keeps. OTHER: state that cannot be divided by tokens or by rows."""

    ATTENTION = auto()
    WINDOW = auto()
    RECURRENT = auto()  # the same class holds one row or several
    BATCHED_ATTENTION = auto()
    BATCHED_WINDOW = auto()
    OTHER = auto()


_KINDS = {
    "KVCache": Kind.ATTENTION,
    "RotatingKVCache": Kind.WINDOW,
    "ArraysCache": Kind.RECURRENT,
    "BatchKVCache": Kind.BATCHED_ATTENTION,
    "BatchRotatingKVCache": Kind.BATCHED_WINDOW,
}
_BATCHABLE = (Kind.ATTENTION, Kind.WINDOW, Kind.RECURRENT)


def kind(cache: Any) -> Kind:
    """The kind of a cache object. A subclass of a known class is OTHER, because it may keep more."""
    cls = type(cache)
    return _KINDS.get(cls.__name__, Kind.OTHER) if cls.__module__ in _LIBRARIES else Kind.OTHER


def leaves(caches: Iterable[Any]) -> list[Any]:
    """The cache objects that hold arrays, including those inside a CacheList."""
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if _is_list(cache) else [cache]
    return found


def _is_list(cache: Any) -> bool:
    return any(cls.__name__ == "CacheList" and cls.__module__ in _LIBRARIES for cls in type(cache).__mro__)


def can_batch(caches: Iterable[Any]) -> bool:
    """Whether rows with such state can share a batch cache. Quantised and chunked caches decode alone."""
    return all(kind(leaf) in _BATCHABLE for leaf in leaves(caches))


def arrays(value: Any) -> list[mx.array]:
    """All arrays in a cache's state, at any depth of nesting. Other values are skipped."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in arrays(item)]
    return []


def state_arrays(caches: Iterable[Any]) -> list[mx.array]:
    return [array for cache in caches for array in arrays(cache.state)]


def complete(*work: Any) -> None:
    """Evaluate arrays, and wait until MLX knows whether this and all earlier work of the thread succeeded.

    Raises RuntimeError if it did not. An evaluation alone may return before the error is known
    (mlx/backend/metal/event.cpp).
    """
    mx.eval(*work)
    mx.synchronize()


def state_bytes(caches: Iterable[Any]) -> int:
    """Bytes by shape and type, which is exact for lazy arrays too and evaluates nothing."""
    return sum(array.nbytes for array in state_arrays(caches))


def footprint(caches: Iterable[Any]) -> RowFootprint:
    """The memory that a row takes at any length, computed from the state of a row that has run at least one token.

    An unknown class is assumed to grow with every token, by the bytes that its buffers hold per slot.
    """
    caches = list(caches)
    bytes_per_token = fixed_bytes = 0
    windows: dict[int, int] = {}
    for leaf in leaves(caches):
        if kind(leaf) is Kind.RECURRENT:
            fixed_bytes += state_bytes([leaf])
            continue
        slot_bytes = sum(array.nbytes // array.shape[-2] for array in state_arrays([leaf]) if array.ndim == 4)
        if kind(leaf) is Kind.WINDOW:
            windows[leaf.max_size] = windows.get(leaf.max_size, 0) + slot_bytes
        else:
            bytes_per_token += slot_bytes
    return RowFootprint(
        bytes_per_token=bytes_per_token,
        fixed_bytes=fixed_bytes,
        windows=tuple(sorted(windows.items())),
        num_layers=max(1, _num_growing(caches)),
    )


def _num_growing(caches: Iterable[Any]) -> int:
    """The layers that hold most of a long row: the ones that grow with every token, or the windows if none does."""
    kinds = [{kind(leaf) for leaf in leaves([cache])} for cache in caches]
    num_growing = sum(bool(found - {Kind.WINDOW, Kind.RECURRENT}) for found in kinds)
    return num_growing or sum(Kind.WINDOW in found for found in kinds)


@contextmanager
def reserving(caches: Iterable[Any], num_tokens: int) -> Iterator[None]:
    """Layers that allocate their first buffer within this context, and grow with every token, allocate it for
    `num_tokens`, so that later chunks are written in place. Sliding windows never hold that many."""
    growing = [leaf for leaf in leaves(caches) if kind(leaf) is Kind.ATTENTION]
    for leaf in growing:
        leaf.step = allocated_slots(num_tokens)
    try:
        yield
    finally:
        for leaf in growing:
            del leaf.step  # the class has the usual one


def leave_window(caches: Iterable[Any]) -> None:
    """Cut sliding-window layers back to the window: a chunk of n tokens leaves n - 1 tokens more in them."""
    for leaf in leaves(caches):
        if kind(leaf) is Kind.WINDOW and not leaf.keep and leaf.keys is not None:
            excess = leaf.keys.shape[2] - leaf.max_size
            if excess > 0:  # after a chunk, the tokens are in order
                leaf.keys, leaf.values = (mx.contiguous(a[:, :, excess:]) for a in (leaf.keys, leaf.values))
                leaf._idx = leaf.max_size


def merge(rows: Sequence[LayerCaches]) -> LayerCaches:
    """Build one batch cache per layer from single-row states, which are emptied: no layer is held twice.

    Evaluates one layer at a time, so at its peak it takes one layer more than the rows.
    """
    merged = []
    for index in range(len(rows[0])):
        layer = _take_layer(rows, index)
        mx.eval(state_arrays([layer]))
        merged.append(layer)
    return merged


def length_counters(caches: LayerCaches) -> list[Any]:
    """The batch caches that count the lengths of their rows in an array."""
    return [leaf for leaf in leaves(caches) if kind(leaf) in (Kind.BATCHED_ATTENTION, Kind.BATCHED_WINDOW)]


def set_lengths(counters: Iterable[Any], lengths: Sequence[int]) -> None:
    """Give batch caches the lengths of their rows as evaluated numbers.

    The libraries count them by an operation a step. A layer without rotary embedding never evaluates these, and each
    keeps a buffer. mlx-vlm counts in place, so every layer gets an array of its own.
    """
    counted = mx.array(list(lengths))
    for counter in counters:
        counter.offset = copy(counted)


def extend(batch: LayerCaches, rows: Sequence[LayerCaches]) -> None:
    """Append single-row states, which are emptied, to a batch cache. At its peak it takes copies of one layer more."""
    for index, layer in enumerate(batch):
        layer.extend(_take_layer(rows, index))
        mx.eval(state_arrays([layer]))


def _take_layer(rows: Sequence[LayerCaches], index: int) -> Any:
    """Merge one layer of single-row states. The rows drop their references, so it is freed once it is copied."""
    singles = [row[index] for row in rows]
    for row in rows:
        row[index] = None
    return singles[0].merge(singles)


def keep(batch: LayerCaches, indices: Sequence[int]) -> None:
    """Keep only the rows at `indices`, in this order."""
    chosen = mx.array(list(indices))
    for layer in batch:
        layer.filter(chosen)
        mx.eval(state_arrays([layer]))


def extract(batch: LayerCaches, index: int) -> LayerCaches:
    """Copy one row's state out of the batch's buffers."""
    row = []
    for layer in batch:
        single = layer.extract(index)
        for leaf in leaves([single]):
            if kind(leaf) is Kind.RECURRENT:  # the library's slice would keep the batch's buffers alive
                leaf.cache = [None if array is None else mx.contiguous(array) for array in leaf.cache]
        mx.eval(state_arrays([single]))
        row.append(single)
    return row
