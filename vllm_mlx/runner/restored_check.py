"""Compares KV that was read from disk with what the model computes now. It knows no tree and no file."""

import mlx.core as mx

from ..cache import layers
from ..cache.index import WORD_BYTES
from ..cache.snapshot import KVSegment
from .model import Model

_NUM_TOKENS = 32
# Kernels for other numbers of tokens round differently; a model or library that changed differs by more than this.
_MAX_DIFFERENCE = 0.1


def difference(model: Model, words: bytes, segment: KVSegment) -> str | None:
    """Compare the KV of a prompt's first tokens, up to 32 and to its first image. None: it is equal up to rounding.

    `words`: the packed prompt. `segment`: KV from its first token on.
    """
    ids = [int.from_bytes(words[at : at + WORD_BYTES], "big") for at in range(0, _NUM_TOKENS * WORD_BYTES, WORD_BYTES)]
    ids = ids[: min(len(words) // WORD_BYTES, segment.length)]
    num_text = next((index for index, word in enumerate(ids) if word >= model.vocab_size), len(ids))
    if not num_text:
        return None
    caches = model.new_caches()
    layers.complete(model.forward(mx.array([ids[:num_text]]), caches), layers.state_arrays(caches))
    kv, _ = layers.split(caches)
    attention = [leaf for leaf in kv if layers.kind(leaf) is layers.Kind.ATTENTION]
    for layer, leaf in enumerate(attention):
        stored = segment.attention(layer, num_text)
        for name, side in (("keys", 0), ("values", 1)):
            restored = mx.concatenate([part[side] for part in stored], axis=2)
            computed = layers.tokens(leaf, num_text)[side]
            if restored.shape != computed.shape:
                return f"the {name} of layer {layer} have the shape {restored.shape}, not {computed.shape}"
            error = _relative(restored, computed)
            if not error <= _MAX_DIFFERENCE:
                return f"the {name} of layer {layer} differ by {error:.0%}"
    return None


def _relative(a: mx.array, b: mx.array) -> float:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.sqrt(mx.sum((a - b) ** 2)) / mx.maximum(mx.sqrt(mx.sum(b**2)), 1e-9))
