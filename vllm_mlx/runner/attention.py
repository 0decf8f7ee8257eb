"""Attention as every model reaches it, `mx.fast.scaled_dot_product_attention`: observed, and with the kernel chosen.

MLX chooses a kernel by the shapes of one call. Where it has none, or prefers matrix products, it keeps the scores of
all heads in memory: heads × chunk × context, which no measurement of a short chunk shows. Models of mlx-lm and mlx-vlm
look the function up when they call it, so it is replaced for the duration of a `with` block, on the engine thread.
This is the only place that replaces anything of a library.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

# Head widths for which Metal has a kernel of more than 8 queries that keeps no scores, if keys and values are equally
# wide (`has_fused_kernel` in mlx/backend/metal/scaled_dot_product_attention.cpp).
FUSED_WIDTHS = frozenset({64, 72, 80, 96, 128, 192, 256})
# MLX prefers matrix products for these, which are faster and take memory (`use_fallback` in the same file).
UNPREFERRED_WIDTHS = frozenset({192, 256})
_FEW_QUERIES = 8  # up to so many, other kernels are used, and scores are small
_COPIES = 2  # scores and masked scores live at once (the fallback of `scaled_dot_product_attention` in mlx/fast.cpp)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer's memory for scores depends on."""

    num_heads: int  # heads of the queries
    key_width: int
    value_width: int
    item_bytes: int  # bytes of one element

    @property
    def has_fused_kernel(self) -> bool:
        """Whether Metal can compute it without scores in memory."""
        return self.key_width == self.value_width and self.key_width in FUSED_WIDTHS

    @property
    def needs_forcing(self) -> bool:
        """Whether MLX uses that kernel only if it is forced to."""
        return self.has_fused_kernel and self.key_width in UNPREFERRED_WIDTHS

    @property
    def score_bytes(self) -> int:
        """Bytes for each pair of a token of the chunk and a token before it, if scores are kept in memory."""
        return _COPIES * self.num_heads * self.item_bytes


def score_bytes(shapes: frozenset[AttentionShape], *, on_metal: bool) -> int:
    """Bytes for each pair of tokens in the most expensive layer; 0 if all layers run without scores in memory.

    MLX's CPU backend always keeps the scores.
    """
    return max((shape.score_bytes for shape in shapes if not (on_metal and shape.has_fused_kernel)), default=0)


@contextmanager
def observed() -> Iterator[set[AttentionShape]]:
    """Collect the shapes of all attention calls in the block."""
    shapes: set[AttentionShape] = set()

    def observe(original: Callable[..., Any], queries: mx.array, keys: Any, values: Any, **options: Any) -> Any:
        shapes.add(AttentionShape(queries.shape[1], queries.shape[-1], values.shape[-1], queries.dtype.size))
        return original(queries, keys, values, **options)

    with _replaced(observe):
        yield shapes


def memory_saving(shapes: frozenset[AttentionShape], threshold_bytes: int) -> AbstractContextManager[None]:
    """Force the fused kernel in the block for calls whose scores would take more than `threshold_bytes`.

    It is slower than MLX's choice. Without Metal, or for other widths, there is nothing to force.
    """
    if not mx.metal.is_available() or not any(shape.needs_forcing for shape in shapes):
        return nullcontext()
    return forcing(threshold_bytes)


@contextmanager
def forcing(threshold_bytes: int) -> Iterator[None]:
    """Pass `force_fused=True` to calls that need it and whose scores would take more than `threshold_bytes`."""

    def force(original: Callable[..., Any], queries: mx.array, keys: Any, values: Any, **options: Any) -> Any:
        shape = AttentionShape(queries.shape[1], queries.shape[-1], values.shape[-1], queries.dtype.size)
        num_pairs = queries.shape[0] * queries.shape[2] * keys.shape[2]
        is_large = queries.shape[2] > _FEW_QUERIES and num_pairs * shape.score_bytes > threshold_bytes
        if is_large and shape.needs_forcing:
            options = {**options, "force_fused": True}
        return original(queries, keys, values, **options)

    with _replaced(force):
        yield


@contextmanager
def _replaced(replacement: Callable[..., Any]) -> Iterator[None]:
    original = mx.fast.scaled_dot_product_attention
    setattr(  # noqa: B010 - the library declares it as a function
        mx.fast, "scaled_dot_product_attention", lambda *inputs, **options: replacement(original, *inputs, **options)
    )
    try:
        yield
    finally:
        setattr(mx.fast, "scaled_dot_product_attention", original)  # noqa: B010
