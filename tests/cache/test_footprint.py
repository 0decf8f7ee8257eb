"""What rows take, for the layers whose buffers are not simply their tokens'. `test_snapshot` measures whole models."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache

from vllm_mlx.cache import layers
from vllm_mlx.cache.footprint import footprint
from vllm_mlx.core.memory import most_slots

SLOT = 2 * 2 * 8 * 4  # keys and values of two heads, eight wide, in fp32


class Own(KVCache):
    """A class that nobody knows."""


def kv(num_tokens: int) -> tuple[mx.array, mx.array]:
    return mx.zeros((1, 2, num_tokens, 8)), mx.zeros((1, 2, num_tokens, 8))


@pytest.mark.parametrize("chunk", [24, 256, 300])
@pytest.mark.parametrize("prefill", [1, 20, 100, 400])
def test_chunked_layers_never_take_more_than_was_reckoned(chunk: int, prefill: int) -> None:
    cache = ChunkedKVCache(chunk)
    cache.update_and_fetch(*kv(1))
    said = footprint([cache])
    assert said.windows == ((chunk, SLOT),) and said.bytes_per_token == 0
    cache, length = ChunkedKVCache(chunk), 0
    for num_tokens in (*[prefill] * 5, *[1] * 600):
        cache.maybe_trim_front()
        cache.update_and_fetch(*kv(num_tokens))
        layers.leave_window([cache])
        length += num_tokens
        assert layers.state_bytes([cache]) <= said.bytes_at(length)
    keys, values = layers.tokens(cache, length)
    assert keys.nbytes + values.nbytes == said.copy_bytes(length) == chunk * SLOT


def test_a_layer_that_is_copied_whole_takes_its_bytes_at_every_copy() -> None:
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 100))
    caches = [Own(), KVCache(), state]
    for cache in caches[:2]:
        cache.update_and_fetch(*kv(1))
    said = footprint(caches, {256: 256 * SLOT + 40, 512: 512 * SLOT + 40})
    assert (said.bytes_per_token, said.whole_bytes_per_token, said.fixed_bytes) == (SLOT, SLOT, 440)
    assert said.copy_bytes(10, 1000) == 440 + 10 * SLOT + most_slots(1000) * SLOT
    assert said.bytes_at(1000) == 440 + 2 * most_slots(1000) * SLOT


@pytest.mark.parametrize(
    ("sizes", "per_token", "beside"),
    [
        ({256: 1000, 512: 1000}, 0, 1000),  # it does not grow
        ({256: 2560, 512: 5120}, 10, 0),
        ({256: 0, 512: 5120}, 20, 0),  # a negative start is none
        ({256: 2561, 512: 5120}, 10, 0),
    ],
)
def test_the_line_through_two_sizes_is_not_below_them(sizes: dict[int, int], per_token: int, beside: int) -> None:
    cache = Own()
    cache.update_and_fetch(*kv(1))
    said = footprint([cache], sizes)
    assert (said.whole_bytes_per_token, said.fixed_bytes) == (per_token, beside)
