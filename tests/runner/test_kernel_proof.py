"""Attention that MLX computes wrong over many keys is found at load, and right attention is never suspected."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.engine.sizing import load_measured
from vllm_mlx.runner.attention import AttentionShape
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.kernel_proof import check_kernels

right = mx.fast.scaled_dot_product_attention
Attention = Callable[..., mx.array]


def without_mask(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **options: Any) -> mx.array:
    """Short rows are right, as in most wrong kernels of MLX."""
    return right(q, k, v, mask=mask if k.shape[2] < 1024 else None, **options)


def with_keys_of_the_first_row(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    if k.shape[2] >= 8192:
        k, v = (mx.broadcast_to(array[:1], array.shape) for array in (k, v))
    return right(q, k, v, **options)


def with_the_mask_of_the_first_row(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **options: Any) -> Any:
    if isinstance(mask, mx.array) and k.shape[2] >= 1024:
        mask = mask[:1]
    return right(q, k, v, mask=mask, **options)


def with_few_keys(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **options: Any) -> mx.array:
    mask = mask[..., :1024] if isinstance(mask, mx.array) else mask
    return right(q, k[:, :, :1024], v[:, :, :1024], mask=mask, **options)


def with_one_query_for_all(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    return right(mx.broadcast_to(q[:, :, :1], q.shape), k, v, **options)


def with_keys_of_the_first_head(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    return right(q, *((mx.broadcast_to(a[:, :1], a.shape) if a.shape[2] >= 8192 else a) for a in (k, v)), **options)


def without_sinks(q: mx.array, k: mx.array, v: mx.array, *, sinks: Any = None, **options: Any) -> mx.array:
    return right(q, k, v, **options) if k.shape[2] >= 1024 else right(q, k, v, sinks=sinks, **options)


def not_a_number(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    return right(q, k, v, **options) * (mx.nan if q.shape[2] == 4 and q.shape[0] == 2 else 1)


WRONG = [
    without_mask,
    with_keys_of_the_first_row,
    with_the_mask_of_the_first_row,
    with_few_keys,
    with_one_query_for_all,
    with_keys_of_the_first_head,
    not_a_number,
]
SHAPE = AttentionShape(4, 16, 16, 4, num_kv_heads=2, dtype="float32")


@pytest.mark.parametrize("wrong", WRONG)
def test_a_model_is_refused_whose_attention_is_wrong_over_many_keys(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, wrong: Attention
) -> None:
    config = EngineConfig(model=str(checkpoint("qwen3")))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", wrong)
    with pytest.raises(ModelLoadError, match=r"computes attention wrong .* keys of width .* another version of mlx"):
        load_measured(config, find_checkpoint(config.model))


def test_sinks_are_tried_where_the_model_has_them(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(checkpoint("gpt_oss")))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", without_sinks)
    with pytest.raises(ModelLoadError, match="computes attention wrong"):
        load_measured(config, find_checkpoint(config.model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        AttentionShape(4, 16, 8, 4, num_kv_heads=4, has_sinks=True),
        pytest.param(AttentionShape(8, 16, 16, 4, True, num_kv_heads=1), marks=pytest.mark.full),
        pytest.param(AttentionShape(2, 64, 64, 4, num_kv_heads=1), marks=pytest.mark.full),
    ],
)
def test_right_attention_is_never_suspected(shape: AttentionShape, dtype: str) -> None:
    check_kernels([replace(shape, dtype=dtype)])


def test_large_shapes_are_left_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no kernel that could be wrong, and a load must not take seconds more."""
    if mx.default_device() != mx.gpu:
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", without_mask)
        check_kernels([AttentionShape(64, 128, 128, 2, num_kv_heads=8)])
