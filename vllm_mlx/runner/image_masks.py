"""Attention in both directions inside images, for families that have it. Wraps a layer's cache for one chunk."""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np


class ImageMask:
    """A cache whose masks let the tokens of an image see each other. In all else it is the cache it wraps.

    A chunk holds its images to their ends; of one that begins before it, the part before is seen as any past is.
    """

    def __init__(self, cache: Any, images: Iterable[tuple[int, int]], start: int):
        """`images`: (start, end) of each in the row; `start`: the chunk's first position."""
        self._cache = cache
        self._images = tuple(images)
        self._start = start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, num_tokens: int, window_size: int | None = None, **options: Any) -> mx.array:
        if num_tokens == 1:  # nothing of an image is ahead of its last token
            mask: mx.array = self._cache.make_mask(num_tokens, window_size=window_size, **options)
            return mask
        mask = self._cache.make_mask(num_tokens, window_size=window_size, return_array=True)
        num_keys = mask.shape[-1]
        first_key = self._start + num_tokens - num_keys
        seen = np.zeros((num_tokens, num_keys), dtype=bool)
        for start, end in self._images:
            rows = slice(max(start - self._start, 0), max(end - self._start, 0))
            seen[rows, max(start - first_key, 0) : max(end - first_key, 0)] = True
        return mx.logical_or(mask, mx.array(seen))
