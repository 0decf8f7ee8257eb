"""An mlx-vlm checkpoint as a `Model`: its language model is given every row's positions and features."""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.layers import LayerCaches
from ..cache.media import MediaCache
from ..core.sequence import MediaItem, Sequence
from .model import Model
from .vision_inputs import Features, ImageMask, chunk_positions, encode, text_delta


class MultimodalModel(Model):
    """Text alone and text with images take the same path.

    Without positions, mlx-vlm reuses those of the last call, kept on the language model. So for a family that places
    images in a grid every call passes positions, and none are kept.
    """

    def __init__(self, module: Any):
        self._language = module.language_model
        self.has_grid = hasattr(self._language, "get_rope_index")
        self._cache: MediaCache[Features] = MediaCache(0)  # the scheduler sets its size
        super().__init__(module)

    @property
    def media(self) -> MediaCache[Features]:
        return self._cache

    @property
    def bidirectional_images(self) -> bool:
        """Whether the tokens of an image attend to each other, so that no chunk may end inside an image."""
        return getattr(self.module.config.text_config, "use_bidirectional_attention", None) == "vision"

    def forget_images(self) -> None:
        """Drop all features, and reset the counts."""
        self._cache = MediaCache(0)

    def new_caches(self) -> LayerCaches:
        from mlx_vlm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self._language))

    def forward(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        rows, num_tokens = tokens.shape
        return self._run(tokens, caches, np.tile(np.arange(num_tokens), (3, rows, 1)))

    def encode(self, seq: Sequence, start: int, end: int) -> None:
        for item in _between(seq, start, end):
            self._features(seq, item)

    def prefill(self, seq: Sequence, start: int, end: int, caches: LayerCaches) -> mx.array:
        tokens = mx.array([seq.tokens(start, end)])
        positions = chunk_positions(self.items_in_grid(seq), start, end)[:, None]
        items = _between(seq, start, end)
        if not items:
            return self._run(tokens, caches, positions)
        if self.bidirectional_images:
            spans = [(item.offset, item.end) for item in items]
            caches = [ImageMask(cache, spans, start) for cache in caches]
        return self._run(tokens, caches, positions, **self.chunk_inputs(seq, items, tokens, start))

    def decode(self, seqs: Rows[Sequence], tokens: mx.array, caches: LayerCaches) -> mx.array:
        at = [seq.num_computed_tokens - 1 + text_delta(self.items_in_grid(seq)) for seq in seqs]
        positions = np.tile(np.array(at, dtype=np.int32)[:, None], (3, 1, 1))
        return self._run(tokens[:, None], caches, positions)[:, -1]

    def chunk_inputs(self, seq: Sequence, items: Rows[MediaItem], tokens: mx.array, start: int) -> dict[str, Any]:
        """What the language model takes beside ids and positions. `tokens: (1, n)` start at `start` and hold items."""
        merged = self.module.get_input_embeddings(tokens).to_dict()
        embeddings, position, cuts = merged["inputs_embeds"][0], 0, []
        parts = []
        seen = np.zeros(tokens.shape, dtype=bool)
        for item in items:
            low, high = max(item.offset - start, 0), min(item.end - start, tokens.shape[1])
            cut = self._features(seq, item).cut(low + start - item.offset, high + start - item.offset)
            parts += [embeddings[position:low], cut.embeddings.astype(embeddings.dtype)]
            cuts.append(cut)
            seen[0, low:high] = True
            position = high
        inputs: dict[str, Any] = {"inputs_embeds": mx.concatenate([*parts, embeddings[position:]])[None]}
        if merged["per_layer_inputs"] is not None:
            inputs["per_layer_inputs"] = merged["per_layer_inputs"]
        if cuts[0].deepstack:
            depths = range(len(cuts[0].deepstack))
            inputs["deepstack_visual_embeds"] = [mx.concatenate([cut.deepstack[d] for cut in cuts]) for d in depths]
            inputs["visual_pos_masks"] = mx.array(seen)
        return inputs

    def _features(self, seq: Sequence, item: MediaItem) -> Features:
        key = seq.media_key(item)
        features = self._cache.get(key)
        if features is None:
            start = time.perf_counter()
            features = encode(self.module, seq.tokens(item.offset, item.end), item)
            self._cache.put(key, features, seconds=time.perf_counter() - start)
            if not isinstance(item.inputs, Mapping):
                item.inputs.drop()
        return features

    def items_in_grid(self, seq: Sequence) -> list[MediaItem]:
        """The row's media that form grids; none for a family without grids."""
        return [item for item in seq.prompt.media if item.layout is not None] if self.has_grid else []

    def _run(self, tokens: mx.array, caches: LayerCaches, positions: np.ndarray, **inputs: Any) -> mx.array:
        """`positions: (3, rows, n)`; families without grids compute their own."""
        if self.has_grid:
            inputs["position_ids"] = mx.array(positions.astype(np.int32))
        logits: mx.array = self._language(tokens, cache=caches, **inputs).logits
        return logits


def _between(seq: Sequence, start: int, end: int) -> list[MediaItem]:
    return [item for item in seq.prompt.media if item.offset < end and item.end > start]
