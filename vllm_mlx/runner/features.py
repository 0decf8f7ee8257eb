"""One medium as the language model takes it in: what the tower made of it, and its cuts. Knows no cache and no row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.errors import Unsupported
from ..core.sequence import MediaItem, TowerInputs

# What a family's merged inputs may consist of. Positions are given by us; of a mask nothing comes to a decoder.
KNOWN_INPUTS = frozenset({
    "inputs_embeds", "visual_pos_masks", "deepstack_visual_embeds", "per_layer_inputs",
    "position_ids", "rope_deltas", "attention_mask_4d",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Features:
    embeddings: mx.array  # (tokens, hidden)
    deepstack: tuple[mx.array, ...] = ()  # one (tokens, hidden) for each of the first layers

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.embeddings, *self.deepstack))

    def cut(self, start: int, end: int) -> "Features":
        return Features(self.embeddings[start:end], tuple(layer[start:end] for layer in self.deepstack))


def encode(module: Any, token_ids: list[int], item: MediaItem) -> Features:
    """Run the tower of an mlx-vlm model on one image or piece of a video, whose tokens are `token_ids`. Evaluated.

    The family's own merging is asked for these tokens alone, so whatever it does to an image it does here.
    """
    ids = mx.array([token_ids])
    merged = module.get_input_embeddings(ids, **tower_inputs(item.inputs), mask=mx.ones(ids.shape, mx.int32)).to_dict()
    unknown = {name for name, value in merged.items() if value is not None} - KNOWN_INPUTS
    if unknown:
        raise Unsupported(f"This family passes images on in a way that is not served: {', '.join(sorted(unknown))}.")
    deepstack = merged["deepstack_visual_embeds"]
    features = Features(
        mx.contiguous(merged["inputs_embeds"][0]),
        () if deepstack is None else tuple(_at_all(layer, merged["visual_pos_masks"]) for layer in deepstack),
    )
    mx.eval(features.embeddings, *features.deepstack)
    return features


def _at_all(layer: mx.array, seen: mx.array) -> mx.array:
    """`layer: (placeholders, hidden)` is added to the `seen: (1, tokens)`; to the text between them, nothing."""
    if layer.shape[0] != seen.sum().item():
        raise Unsupported("This family's images have tokens that the tower does not fill at every depth.")
    rows = mx.maximum(mx.cumsum(seen[0].astype(mx.int32)) - 1, 0)
    return mx.contiguous(mx.where(seen[0][:, None], layer[rows], mx.zeros_like(layer[:1])))


def tower_inputs(inputs: Mapping[str, np.ndarray] | TowerInputs) -> dict[str, mx.array]:
    arrays = inputs if isinstance(inputs, Mapping) else inputs.get()
    return {name: mx.array(array) for name, array in arrays.items()}
