"""Observes, divides and steers the attention of every model: `mx.fast.scaled_dot_product_attention`.

MLX chooses a kernel by the shapes of one call. Where it has none, or prefers matrix products, it keeps the scores of
all heads in memory: heads × chunk × context, which no measurement of a short chunk shows. Models of mlx-lm and mlx-vlm
look the function up when they call it, so it is replaced for the duration of a `with` block, on the engine thread.
There `mx.where` is also replaced while rows in groups decode: latent attention masks its scores with it.
Besides `formats/remote_code.py`, this is the only place that replaces anything of a library.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from .grouped import GroupedKV, GroupMasks
from .model_types import text_config

# These facts were read in MLX's code. No Mac has verified them.
# Head widths for which Metal has a kernel of more than 8 queries that keeps no scores, if keys and values are equally
# wide (`has_fused_kernel` in mlx/backend/metal/scaled_dot_product_attention.cpp).
FUSED_WIDTHS = frozenset({64, 72, 80, 96, 128, 192, 256})
# MLX prefers matrix products for these, which are faster and take memory (`use_fallback` in the same file).
UNPREFERRED_WIDTHS = frozenset({192, 256})
# No Mac has shown whether forcing pays with MLX 0.32.4, which may compute these in blocks.
FORCES = os.environ.get("VLLM_MLX_FORCE_ATTENTION") != "0"
_FORCED_BYTES = 2  # bytes of an element; with more, they exceed a threadgroup's 32 KB (steel_attention.h)
_FEW_QUERIES = 8  # this many or fewer take other kernels, and their scores are small
_COPIES = 2  # scores and masked scores live together (the fallback of `scaled_dot_product_attention` in mlx/fast.cpp)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The facts on which a layer's memory for scores depends."""

    num_heads: int  # heads of the queries
    key_width: int
    value_width: int
    item_bytes: int  # bytes of one element
    has_head_masks: bool = False  # each head has a mask: latent attention passes a part of its scores so
    num_kv_heads: int = 0  # 0 if the model computes attention itself
    dtype: str = "bfloat16"  # of the queries
    has_sinks: bool = False

    @classmethod
    def of(cls, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, sinks: Any = None) -> "AttentionShape":
        """Return the shape of a call with queries, keys and values of shape (rows, heads, tokens, width)."""
        return cls(
            num_heads=queries.shape[1],
            key_width=queries.shape[-1],
            value_width=values.shape[-1],
            item_bytes=max(array.dtype.size for array in (queries, keys, values)),
            has_head_masks=isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] > 1,
            num_kv_heads=keys.shape[1],
            dtype=str(queries.dtype).rpartition(".")[2],
            has_sinks=sinks is not None,
        )

    @property
    def has_fused_kernel(self) -> bool:
        """Return whether Metal can compute it without scores in memory."""
        is_unpreferred = self.key_width in UNPREFERRED_WIDTHS
        is_fused = self.key_width == self.value_width and self.key_width in FUSED_WIDTHS
        return is_fused and (self.item_bytes <= _FORCED_BYTES or not is_unpreferred)

    @property
    def needs_forcing(self) -> bool:
        """Return whether MLX uses that kernel only if it is forced to."""
        return self.has_fused_kernel and self.key_width in UNPREFERRED_WIDTHS

    @property
    def score_bytes(self) -> int:
        """Return bytes for each pair of a token of the chunk and an earlier token, if scores are kept in memory."""
        return (_COPIES + self.has_head_masks) * self.num_heads * self.item_bytes

    def kept_bytes(self, *, on_metal: bool) -> int:
        """Return bytes for each pair. The model computes the masks of heads itself, as scores and masked scores."""
        if not on_metal or not self.has_fused_kernel:
            return self.score_bytes
        return _COPIES * self.num_heads * self.item_bytes if self.has_head_masks else 0


def score_bytes(shapes: frozenset[AttentionShape], *, on_metal: bool) -> int:
    """Return bytes for each pair of tokens in the most expensive layer; 0 if all layers run without scores in memory.

    MLX's CPU backend always keeps the scores.
    """
    return max((shape.kept_bytes(on_metal=on_metal) for shape in shapes), default=0)


def assumed(config: Mapping[str, Any]) -> frozenset[AttentionShape]:
    """Return the shape for a model that computes attention itself, as gemma2 does, and so keeps its scores in memory.

    `config` is its config.json.
    """
    num_heads = text_config(config).get("num_attention_heads") or 1
    return frozenset({AttentionShape(num_heads, key_width=0, value_width=0, item_bytes=4)})


@contextmanager
def observed() -> Iterator[set[AttentionShape]]:
    """Collect the shapes of all attention calls in the block."""
    shapes: set[AttentionShape] = set()

    def observe(original: Callable[..., Any], queries: Any, keys: Any, values: Any, **options: Any) -> Any:
        shapes.add(AttentionShape.of(queries, keys, values, options.get("mask"), options.get("sinks")))
        return original(queries, keys, values, **options)

    with _replaced(observe):
        yield shapes


def can_force(shapes: frozenset[AttentionShape]) -> bool:
    """Return whether this device has a fused kernel that MLX does not prefer for one of the shapes."""
    return FORCES and mx.metal.is_available() and any(shape.needs_forcing for shape in shapes)


@contextmanager
def memory_saving(shapes: frozenset[AttentionShape], threshold_bytes: int) -> Iterator[None]:
    """Force the fused kernel in the block for calls whose scores would take more than `threshold_bytes`.

    It is slower than MLX's choice. Without Metal, or for other widths, there is nothing to force.
    """

    def force(original: Callable[..., Any], queries: Any, keys: Any, values: Any, **options: Any) -> Any:
        mask = options.get("mask")
        shape = AttentionShape.of(queries, keys, values, mask)
        num_rows, num_queries, num_keys = queries.shape[0], queries.shape[2], keys.shape[2]
        is_large = num_rows * num_queries * num_keys * shape.score_bytes > threshold_bytes
        lacks_keys = isinstance(mask, str) and num_queries > num_keys  # no kernel takes a causal mask then
        has_kernel = num_queries > _FEW_QUERIES and not lacks_keys
        if is_large and has_kernel and shape.needs_forcing:
            options = {**options, "force_fused": True}
        return original(queries, keys, values, **options)

    with _replaced(force) if can_force(shapes) else nullcontext():
        yield


@contextmanager
def by_groups() -> Iterator[None]:
    """Let attention run once per group in the block, where keys and values lie in groups."""
    with _replaced(_attend), _replaced(_where, mx, "where"):
        yield


def _attend(original: Callable[..., Any], queries: Any, keys: Any, values: Any, **options: Any) -> Any:
    if not isinstance(keys, GroupedKV):
        return original(queries, keys, values, **options)
    return keys.attend(original, queries, values, options.pop("mask", None), options)


def _where(original: Callable[..., Any], condition: Any, *others: Any, **options: Any) -> Any:
    return (condition.where if isinstance(condition, GroupMasks) else partial(original, condition))(*others, **options)


@contextmanager
def _replaced(
    replacement: Callable[..., Any], module: Any = mx.fast, name: str = "scaled_dot_product_attention"
) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, partial(replacement, original))
    try:
        yield
    finally:
        setattr(module, name, original)
