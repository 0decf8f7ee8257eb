"""The memory of a row's state at any length, measured on short rows. It knows kinds of layers, but no model."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.memory import ALLOCATION_STEP, RowFootprint
from .layers import Kind, is_recurrent, is_window, kind, leaves, state_arrays, state_bytes, window_of


def footprint(caches: Iterable[Any], whole_sizes: Mapping[int, int] | None = None) -> RowFootprint:
    """Return the memory of a row at any length, computed from the state of a row that has run one token or more.

    `whole_sizes` has, by tokens, the bytes of the layers that are copied whole, of two rows of different lengths. At
    other lengths such layers are expected to take the bytes on the line through these.
    """
    caches = list(caches)
    bytes_per_token = fixed_bytes = spare_bytes = 0
    windows: dict[int, int] = {}
    for leaf in leaves(caches):
        if is_recurrent(leaf):
            fixed_bytes += state_bytes([leaf])
        if is_recurrent(leaf) or kind(leaf) is Kind.OTHER:
            continue
        slot_bytes = sum(array.nbytes // array.shape[-2] for array in state_arrays([leaf]) if array.ndim == 4)
        if is_window(leaf):
            windows[window_of(leaf)] = windows.get(window_of(leaf), 0) + slot_bytes
            spare_bytes += ALLOCATION_STEP * slot_bytes if kind(leaf) is Kind.CHUNKED else 0
        else:
            bytes_per_token += slot_bytes
    whole_per_token, whole_fixed = _line(whole_sizes) if whole_sizes else (0, 0)
    return RowFootprint(
        bytes_per_token=bytes_per_token,
        whole_bytes_per_token=whole_per_token,
        fixed_bytes=fixed_bytes + whole_fixed,
        spare_bytes=spare_bytes,
        windows=tuple(sorted(windows.items())),
        num_layers=max(1, _num_growing(caches)),
    )


def _line(sizes: Mapping[int, int]) -> tuple[int, int]:
    """Return bytes per token, and fixed bytes, of the line through two sizes. Neither is negative."""
    (few, less), (many, more) = sorted(sizes.items())
    per_token = max(0, -(-(more - less) // (many - few)))
    return per_token, max(0, more - many * per_token)


def _num_growing(caches: Iterable[Any]) -> int:
    """Count the layers that hold most of a long row: those that grow with every token, or the windows if none grows."""
    kinds = [{kind(leaf) for leaf in leaves([cache])} for cache in caches]
    num_growing = sum(bool(found - {Kind.WINDOW, Kind.CHUNKED, Kind.RECURRENT}) for found in kinds)
    return num_growing or sum(bool(found & {Kind.WINDOW, Kind.CHUNKED}) for found in kinds)
