"""The model as the runner uses it: tokens and caches in, logits out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Rows
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..cache import layers, snapshot
from ..cache.layers import LayerCaches
from ..cache.media import MediaCache
from ..core.sequence import Sequence
from .vision_inputs import Features


class Model(ABC):
    """A loaded checkpoint. It keeps no state of any request."""

    def __init__(self, module: Any):
        self.module = module
        caches = self.new_caches()
        self.vocab_size = int(self.forward(mx.array([[0]]), caches).shape[-1])  # width of the logits
        mx.eval(layers.state_arrays(caches))
        self.footprint = layers.footprint(caches)
        self.can_batch = layers.can_batch(caches)
        self.resume_rule = snapshot.resume_rule(caches)
        # the window of sliding-window layers in tokens; None: the model has no such layers
        self.window = None if self.resume_rule is None else self.resume_rule.window

    @property
    def media(self) -> MediaCache[Features] | None:
        """The cache of image features; None for a model that takes no images."""
        return None

    @abstractmethod
    def new_caches(self) -> LayerCaches: ...

    @abstractmethod
    def forward(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        """Run text from the caches' end: `tokens: (rows, n)` -> lazy `logits: (rows, n, vocab)`. Caches grow by n."""

    @abstractmethod
    def encode(self, seq: Sequence, start: int, end: int) -> None:
        """Run the vision encoder for images in `[start, end)` whose features are not cached, and wait for it."""

    @abstractmethod
    def prefill(self, seq: Sequence, start: int, end: int, caches: LayerCaches) -> mx.array:
        """Run positions `[start, end)` of one row -> lazy `logits: (1, n, vocab)`, computed only if they are read.

        The caches then hold `end` tokens.
        """

    @abstractmethod
    def decode(self, seqs: Rows[Sequence], tokens: mx.array, caches: LayerCaches) -> mx.array:
        """Feed `tokens: (rows,)` -> lazy `logits: (rows, vocab)`. The sequences' progress already counts them."""


class TextModel(Model):
    """An mlx-lm checkpoint."""

    def new_caches(self) -> LayerCaches:
        return list(make_prompt_cache(self.module))

    def forward(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        logits: mx.array = self.module(tokens, cache=caches)
        return logits

    def encode(self, seq: Sequence, start: int, end: int) -> None:
        """Do nothing: this model takes no images."""

    def prefill(self, seq: Sequence, start: int, end: int, caches: LayerCaches) -> mx.array:
        return self.forward(mx.array([seq.tokens(start, end)]), caches)

    def decode(self, seqs: Rows[Sequence], tokens: mx.array, caches: LayerCaches) -> mx.array:
        return self.forward(tokens[:, None], caches)[:, -1]
