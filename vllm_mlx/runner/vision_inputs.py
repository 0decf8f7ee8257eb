"""The inputs of a vision checkpoint's language model except ids: features of images and videos, positions, masks.

It knows neither caches nor batches.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.layers import complete
from ..core.errors import Unsupported
from ..core.sequence import EncoderInputs, MediaItem

# Names that a family's merged inputs may have. We compute positions ourselves, and no mask reaches a decoder.
KNOWN_INPUTS = frozenset({
    "inputs_embeds", "visual_pos_masks", "deepstack_visual_embeds", "per_layer_inputs",
    "position_ids", "rope_deltas", "attention_mask_4d",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Features:
    """The vision encoder's output for one image or piece of a video."""

    embeddings: mx.array  # (tokens, hidden)
    deepstack: tuple[mx.array, ...] = ()  # one (tokens, hidden) array for each of the first layers

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.embeddings, *self.deepstack))

    def cut(self, start: int, end: int) -> "Features":
        return Features(self.embeddings[start:end], tuple(layer[start:end] for layer in self.deepstack))


def encode(module: Any, token_ids: list[int], item: MediaItem) -> Features:
    """Run the vision encoder of an mlx-vlm model on one image or piece of a video. The result is evaluated.

    `token_ids` are those of the item. The family's own merging runs on them alone, so that it treats the image as
    usual.
    """
    ids = mx.array([token_ids])
    merged = module.get_input_embeddings(ids, **input_arrays(item.inputs), mask=mx.ones(ids.shape, mx.int32)).to_dict()
    unknown = {name for name, value in merged.items() if value is not None} - KNOWN_INPUTS
    if unknown:
        raise Unsupported(f"This family passes images on in a way that is not served: {', '.join(sorted(unknown))}.")
    deepstack = merged["deepstack_visual_embeds"]
    features = Features(
        mx.contiguous(merged["inputs_embeds"][0]),
        () if deepstack is None else tuple(_at_all(layer, merged["visual_pos_masks"]) for layer in deepstack),
    )
    complete(features.embeddings, *features.deepstack)
    return features


def _at_all(layer: mx.array, seen: mx.array) -> mx.array:
    """Spread `layer: (placeholders, hidden)` over `seen: (1, tokens)`, with zeros for text between placeholders."""
    if layer.shape[0] != seen.sum().item():
        raise Unsupported("This family's images have tokens that the vision encoder does not fill at every depth.")
    rows = mx.maximum(mx.cumsum(seen[0].astype(mx.int32)) - 1, 0)
    return mx.contiguous(mx.where(seen[0][:, None], layer[rows], mx.zeros_like(layer[:1])))


def input_arrays(inputs: Mapping[str, np.ndarray] | EncoderInputs) -> dict[str, mx.array]:
    arrays = inputs if isinstance(inputs, Mapping) else inputs.get()
    return {name: mx.array(array) for name, array in arrays.items()}


def chunk_positions(media: Iterable[MediaItem], start: int, end: int) -> np.ndarray:
    """Return positions of the row's tokens `[start, end)` on three axes: `(3, end - start)`, int32.

    `media` are in order. Qwen2-VL (arXiv 2409.12191): text advances all axes by one a token; text after an image or a
    video continues after its longest axis.
    """
    positions = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    moved = 0
    for item in media:
        if item.offset >= end:
            break
        assert item.layout is not None, "only media with a layout have such positions"
        low, high = max(item.offset, start), min(item.end, end)
        if low < high:
            layout = item.layout.positions[:, low - item.offset : high - item.offset]
            positions[:, low - start : high - start] = item.offset + moved + layout
        positions[:, max(item.end - start, 0) :] += item.layout.advance - item.length
        moved += item.layout.advance - item.length
    return positions


def text_delta(media: Iterable[MediaItem]) -> int:
    """Return the position of a token after all media, minus its index."""
    return sum(item.layout.advance - item.length for item in media if item.layout is not None)


class ImageMask:
    """Wraps a layer's cache for one chunk: its masks let the tokens of an image attend to each other.

    A chunk holds its images up to their ends. The part of an image before the chunk is attended to like any past token.
    """

    def __init__(self, cache: Any, images: Iterable[tuple[int, int]], start: int):
        """`images` are given by their (start, end) in the row. `start` is the chunk's first position."""
        self._cache = cache
        self._images = tuple(images)
        self._start = start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, num_tokens: int, window_size: int | None = None, **options: Any) -> mx.array:
        if num_tokens == 1:  # no token of an image follows its last one
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
