"""Proves at load that MLX's attention is right where it has other kernels: from 1,024, 4,096 and 8,192 keys on."""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product

import mlx.core as mx

from ..core.errors import ModelLoadError
from .attention import AttentionShape

# These figures follow from MLX's source and from tries on a CPU. No Mac has verified them.
_NUM_KEYS, _NUM_QUERIES, _NUM_ROWS = (1100, 8200), (1, 4, 8), (1, 2)
_ON_CPU = (8200,), (4,), (2,)  # it has one way for all sizes, and takes long
_MOST_ERROR = 0.05  # norm of the difference from a result ÷ norm of that; half precision stays below 0.01 or so
_MOST_ON_CPU = 128  # numbers of a query in all heads; for more, a CPU computes the same products, and takes seconds


def check_kernels(shapes: Iterable[AttentionShape]) -> None:
    """Compare attention of these shapes with plain products in float32. Raises ModelLoadError if they differ."""
    for shape in shapes:
        is_quick = mx.default_device() == mx.gpu or shape.num_heads * shape.key_width <= _MOST_ON_CPU
        if is_quick and shape.num_kv_heads and (fault := _fault(mx.fast.scaled_dot_product_attention, shape)):
            advice = "Install another version of mlx, such as the one that scripts/requirements.lock names."
            raise ModelLoadError(f"The installed mlx computes attention wrong on this machine: {fault}. {advice}")


@cache
def _fault(attend: Callable[..., mx.array], shape: AttentionShape) -> str | None:
    """Name the call for which `attend` is wrong. Returns None if it is right for all."""
    is_gpu = mx.default_device() == mx.gpu
    all_keys, all_queries, all_rows = (_NUM_KEYS, _NUM_QUERIES, _NUM_ROWS) if is_gpu else _ON_CPU
    heads, kv_heads, scale = shape.num_heads, shape.num_kv_heads, shape.key_width**-0.5
    most, longest = all_keys[-1], all_queries[-1]
    sizes = (heads, longest, shape.key_width), (kv_heads, most, shape.key_width), (kv_heads, most, shape.value_width)
    dtype, chances = getattr(mx, shape.dtype), mx.random.split(mx.random.key(0), 3)
    draws = [mx.random.uniform(-2, 2, (2, *size), dtype, key) for size, key in zip(sizes, chances, strict=True)]
    sinks = 8 + draws[0][0, :, 0, 0] if shape.has_sinks else mx.full((heads,), -mx.inf)
    options = {"scale": scale} | ({"sinks": sinks} if shape.has_sinks else {})
    masks = mx.random.bernoulli(0.5, (2, heads if shape.has_head_masks else 1, longest, most), mx.random.key(1))
    for num_keys, mask in product(all_keys, (None, masks)):
        queries, keys, values = draws[0], *(array[:, :, :num_keys] for array in draws[1:])
        right = _plain(scale * queries, keys, values, mx.array(True) if mask is None else mask[..., :num_keys], sinks)
        for rows, num in product(all_rows, all_queries):
            given = None if mask is None else mask[:rows, :, :num, :num_keys]
            found = attend(queries[:rows, :, :num], keys[:rows], values[:rows], mask=given, **options)
            wanted = right[:rows, :, :num]
            if not (mx.linalg.norm(found - wanted, axis=-1) < _MOST_ERROR * mx.linalg.norm(wanted, axis=-1)).all():
                call = f"{num} queries over {num_keys} keys of width {shape.key_width} in {rows} rows"
                return f"{call}, with {'no' if mask is None else 'a'} mask"
    return None


def _plain(q: mx.array, k: mx.array, v: mx.array, mask: mx.array, sinks: mx.array) -> mx.array:
    q, k, v = (mx.repeat(array.astype(mx.float32), q.shape[1] // array.shape[1], axis=1) for array in (q, k, v))
    scores = mx.where(mask, q @ k.swapaxes(-1, -2), -mx.inf)
    total = mx.logaddexp(mx.logsumexp(scores, axis=-1, keepdims=True), sinks.astype(mx.float32)[:, None, None])
    return mx.exp(scores - total) @ v
