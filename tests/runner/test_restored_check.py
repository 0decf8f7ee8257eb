"""Restored KV is compared with computed KV: it passes where both are equal, and nothing else does."""

from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.checkpoints import ARCHITECTURES, checkpoint
from vllm_mlx.cache import layers, snapshot
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.snapshot import Block, KVSegment, Stack
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.model import Model, load_model
from vllm_mlx.runner.restored_check import compare

IDS = [7 + (5 * place * place + 3 * place) % 180 for place in range(80)]
IMAGE = 1 << 62


def loaded(path: Path) -> Model:
    return load_model(find_checkpoint(str(path)), trust_remote_code=False)


def captured(model: Model, ids: list[int]) -> KVSegment:
    caches = model.new_caches()
    layers.complete(model.forward(mx.array([ids]), caches), layers.state_arrays(caches))
    kv, states = layers.split(caches)
    row = snapshot.view(kv, 0, states, 0, len(ids))
    return snapshot.capture(row, 0, len(ids), model.window)[0]


def difference(model: Model, words: bytes, segment: KVSegment) -> str | None:
    return compare(model, words, segment, None).difference


def altered(segment: KVSegment, change: float) -> KVSegment:
    """The same KV with its last layer's values multiplied."""
    [block] = segment.blocks
    buffers = tuple(buffer * change for buffer in block.kv.buffers)
    return KVSegment(
        segment.length, (Block(block.length, Stack(buffers, block.kv.places)),), segment.windows, segment.window_offset
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_model_computes_passes_and_what_it_does_not_is_named(architecture: str) -> None:
    model = loaded(checkpoint(architecture))
    segment = captured(model, IDS)
    assert difference(model, pack(IDS), segment) is None
    if segment.blocks[0].kv.buffers:
        assert "layer 0 differs by" in (difference(model, pack(IDS), altered(segment, 1.5)) or "")
        assert "differs" in (difference(model, pack([9, *IDS[1:]]), segment) or ""), "other tokens"


def test_only_the_text_before_an_image_is_compared() -> None:
    model = loaded(checkpoint("qwen3"))
    segment = captured(model, IDS)
    assert difference(model, pack([*IDS[:10], *[IMAGE] * 70]), segment) is None
    assert difference(model, pack([IMAGE] * 80), altered(segment, 2.0)) is None


def test_kv_of_another_shape_is_refused() -> None:
    model, other = loaded(checkpoint("qwen3")), loaded(checkpoint("qwen3", head_dim=32))
    wrong = captured(other, IDS)
    assert wrong.blocks[0].kv.buffers[0].shape[1:] != captured(model, IDS).blocks[0].kv.buffers[0].shape[1:]
    assert "has the shape" in (difference(model, pack(IDS), wrong) or "")
