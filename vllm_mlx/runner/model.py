"""The model as the batch loop sees it: tokens and caches in, logits out."""

from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..cache import layers, snapshot
from ..cache.layers import LayerCaches


class Model(Protocol):
    vocab_size: int  # width of the logits
    window: int | None  # tokens that sliding-window layers see; None: there are none

    def new_caches(self) -> LayerCaches: ...

    def forward(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        """`tokens: (rows, n)` -> `logits: (rows, n, vocab)`, lazy; the caches advance by n."""
        ...


class TextModel:
    """An mlx-lm checkpoint."""

    def __init__(self, module: Any):
        self.module = module
        caches = self.new_caches()
        self.vocab_size = int(self.forward(mx.array([[0]]), caches).shape[-1])
        mx.eval(layers.state_arrays(caches))
        self.footprint = layers.footprint(caches)
        self.can_batch = layers.can_batch(caches)
        self.resume_rule = snapshot.resume_rule(caches)
        self.window = None if self.resume_rule is None else self.resume_rule.window

    def new_caches(self) -> LayerCaches:
        return list(make_prompt_cache(self.module))

    def forward(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        logits: mx.array = self.module(tokens, cache=caches)
        return logits
