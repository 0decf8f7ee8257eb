"""Compares state that was read from disk with what the model computes now. It knows no tree and no file."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache import layers, snapshot
from ..cache.index import WORD_BYTES
from ..cache.snapshot import KVSegment, RecurrentState, RowView
from .model import Model

_NUM_TOKENS = 32
_MAX_STATE_TOKENS = 512
# Kernels for other numbers of tokens round differently; a model or library that changed differs by more than this.
_MAX_DIFFERENCE = 0.1


@dataclass(frozen=True, slots=True)
class Comparison:
    num_tokens: int  # how many were compared
    difference: str | None = None  # None: they are equal up to rounding


def compare(model: Model, words: bytes, segment: KVSegment, state: RecurrentState | None) -> Comparison:
    """Compare the KV of a prompt's first tokens, up to 32 and to its first image.

    A model without attention has its state compared, if that comes early. `words`: the packed prompt up to the state.
    `segment`: KV from its first token on.
    """
    caches = model.new_caches()
    attention = [leaf for leaf in layers.leaves(caches) if layers.kind(leaf) is layers.Kind.ATTENTION]
    most = min(_NUM_TOKENS, segment.length) if attention else _MAX_STATE_TOKENS
    ids = [int.from_bytes(words[at : at + WORD_BYTES], "big") for at in range(0, len(words), WORD_BYTES)][:most]
    num_text = next((index for index, word in enumerate(ids) if word >= model.vocab_size), len(ids))
    if not num_text or (not attention and (state is None or num_text * WORD_BYTES < len(words))):
        return Comparison(0)
    layers.complete(model.forward(mx.array([ids[:num_text]]), caches), layers.state_arrays(caches))
    row = snapshot.view(*_split(caches), num_text)
    if attention or state is None:
        return Comparison(num_text, _kv_difference(row, segment, num_text))
    return Comparison(num_text, _state_difference(row, state))


def _split(caches: layers.LayerCaches) -> tuple[list[Any], int, list[Any], int]:
    kv, states = layers.split(caches)
    return kv, 0, states, 0


def _kv_difference(row: RowView, segment: KVSegment, num_tokens: int) -> str | None:
    for layer, pair in enumerate(row.attention):
        stored = segment.attention(layer, num_tokens)
        for side, name in enumerate(("keys", "values")):
            restored = mx.concatenate([part[side] for part in stored], axis=2)
            if (fault := _fault(restored, pair[side])) is not None:
                return f"the {name} of layer {layer} {fault}"
    return None


def _state_difference(row: RowView, state: RecurrentState) -> str | None:
    for layer, arrays in enumerate(row.recurrent):
        for restored, computed in zip(state.layer(layer), arrays, strict=True):
            if restored is None or computed is None:
                continue
            if (fault := _fault(restored, computed)) is not None:
                return f"the state of layer {layer} {fault}"
    return None


def _fault(restored: mx.array, computed: mx.array) -> str | None:
    if restored.shape != computed.shape:
        return f"has the shape {restored.shape}, not {computed.shape}"
    error = _relative(restored, computed)
    return None if error <= _MAX_DIFFERENCE else f"differs by {error:.0%}"


def _relative(a: mx.array, b: mx.array) -> float:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.sqrt(mx.sum((a - b) ** 2)) / mx.maximum(mx.sqrt(mx.sum(b**2)), 1e-9))
