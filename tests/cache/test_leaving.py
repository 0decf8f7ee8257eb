"""A row that is handed over leaves the same state as a copy of it, in few buffers, and is freed on the way."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from tests.support.checkpoints import OWN_STATE
from vllm_mlx.cache import layers, leaving, snapshot
from vllm_mlx.cache.node import Piece
from vllm_mlx.cache.snapshot import Captured, KVSegment
from vllm_mlx.disk.arrays import run_tensors

TOKENS = [(7 * i) % 500 for i in range(60)]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5", "gemma3_text", "falcon_h1", "gpt_oss", *OWN_STATE])
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Any:
    return load_model(checkpoint(request.param))[0]


def both(model: Any, start: int) -> tuple[Captured, Captured]:
    """The state of the tokens from `start` on: as a copy of a row that goes on, and handed over."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([TOKENS]), cache=caches), layers.state_arrays(caches))
    rule = snapshot.resume_rule(caches)
    assert rule is not None
    kv, states = layers.split(caches)
    row = snapshot.view(kv, 0, states, 0, len(TOKENS))
    copy = snapshot.capture(row, start, len(TOKENS), rule.window)
    given = leaving.hand_over(kv, states, 0, len(TOKENS), start, len(TOKENS), rule.window)
    assert not kv, "every layer has been taken"
    return copy, given


def restored(model: Any, captured: Captured) -> list[mx.array]:
    segment, window_start, state = captured
    num_tokens = len(TOKENS)
    piece = Piece(segment=segment, start=0, end=num_tokens, window_start=window_start, take=num_tokens)
    caches = make_prompt_cache(model)
    snapshot.restore(caches, [piece], state, length=num_tokens, capacity=num_tokens)
    return layers.state_arrays(caches)


def record(segment: KVSegment) -> tuple[dict[str, Any], list[tuple[object, ...]]]:
    """What is written of a segment."""
    layout, tensors = run_tensors(segment, 0, segment.length, segment.window_offset)
    return layout, [(name, dtype, shape, joined(data)) for name, dtype, shape, data in tensors]


def joined(data: Iterable[memoryview]) -> bytes:
    return b"".join(bytes(part) for part in data)


def test_the_state_is_that_of_a_copy(model: Any) -> None:
    copy, given = both(model, 0)
    assert (given[0].nbytes, given[1]) == (copy[0].nbytes, copy[1])
    pairs = zip(restored(model, copy), restored(model, given), strict=True)
    assert all(mx.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("start", [0, 40])
def test_the_record_is_that_of_a_copy(model: Any, start: int) -> None:
    copy, given = both(model, start)
    assert record(given[0]) == record(copy[0])
    left, right = given[0].split(15)
    assert [record(half) for half in copy[0].split(15)] == [record(left), record(right)]


def one_layer(num_tokens: int) -> KVCache:
    leaf = KVCache()
    leaf.update_and_fetch(*(mx.random.normal((1, 2, num_tokens, 64)) for _ in range(2)))
    mx.eval(leaf.keys, leaf.values)
    return leaf


@pytest.mark.parametrize(("num_new", "num_parts"), [(2400, 4), (1200, 2), (500, 1), (1, 1)])
def test_a_part_is_a_quarter_of_the_row_at_most(num_new: int, num_parts: int) -> None:
    kv = [one_layer(2400) for _ in range(8)]
    layer_bytes = layers.state_bytes(kv[:1])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    segment, _, _ = leaving.hand_over(kv, [], 0, 2400, 2400 - num_new, 2400, None)
    assert segment.num_buffers == num_parts * len(segment.blocks)
    assert mx.get_peak_memory() - before <= 2 * layer_bytes
    assert mx.get_active_memory() - before <= segment.nbytes - 8 * layer_bytes + (1 << 16)
