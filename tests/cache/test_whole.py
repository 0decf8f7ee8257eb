"""Cache objects of any class come back from a copy as they were, and nothing else passes for one."""

import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as text
from mlx_lm.models import deepseek_v41
from mlx_vlm.models import cache as vision
from mlx_vlm.models.deepseek_v41.language import DeepseekV41Cache
from mlx_vlm.models.hy_v4.cache import HyV4KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache
from mlx_vlm.models.z1t.language import Z1TCache

from tests.support.rows import row
from vllm_mlx.cache import layers, whole
from vllm_mlx.cache.layers import Kind


def kv(num_tokens: int) -> tuple[mx.array, mx.array]:
    return mx.random.normal((1, 2, num_tokens, 64)), mx.random.normal((1, 2, num_tokens, 64))


def attend(cache: Any, num_tokens: int) -> list[mx.array]:
    return layers.arrays(cache.update_and_fetch(*kv(num_tokens)))


def attend_in_chunks(cache: Any, num_tokens: int) -> list[mx.array]:
    cache.maybe_trim_front()
    return attend(cache, num_tokens)


def pool(cache: Any, num_tokens: int) -> list[mx.array]:
    pooled = cache.accumulate_windows(mx.random.normal((1, num_tokens, 8)), mx.random.normal((1, num_tokens, 8)), 0)[0]
    return [cache.update_and_fetch(pooled.reshape(1, -1, 32))]


def slide(cache: Any, num_tokens: int) -> list[mx.array]:
    cache.pending_kv = mx.random.normal((1, num_tokens % 4, 8))
    return [cache.update_window(mx.random.normal((1, num_tokens, 8))), cache.pending_kv]


def index(cache: Any, num_tokens: int) -> list[mx.array]:
    found = cache.update_indexer(mx.random.normal((1, num_tokens, 8)), mx.zeros((3, 1, num_tokens)))
    return [*found, *attend(cache, num_tokens)]


def index_beside(cache: Any, num_tokens: int) -> list[mx.array]:
    return [cache.update_index_and_fetch(kv(num_tokens)[0]), *attend(cache, num_tokens)]


def compress(cache: Any, num_tokens: int) -> list[mx.array]:
    cache.advance(num_tokens)
    return [cache.append_compressed(1, mx.random.normal((1, num_tokens, 8)))]


def sum_up(cache: Any, num_tokens: int) -> list[mx.array]:
    cache.offset += num_tokens
    cache.win_eKV = mx.random.normal((1, 3, 8))
    return [cache.win_eKV + cache.offset]


MADE = {
    "quantised, mlx-lm": (lambda: text.QuantizedKVCache(64, 8), attend),
    "quantised, mlx-vlm": (lambda: vision.QuantizedKVCache(64, 8), attend),
    "concatenated, mlx-lm": (text.ConcatenateKVCache, attend),
    "concatenated, mlx-vlm": (vision.ConcatenateKVCache, attend),
    "in chunks, mlx-lm": (lambda: text.ChunkedKVCache(8), attend_in_chunks),
    "in chunks, mlx-vlm": (lambda: vision.ChunkedKVCache(8), attend_in_chunks),
    "a window with its first tokens": (lambda: text.RotatingKVCache(8, keep=2), attend),
    "a window with room": (lambda: vision.BufferedRotatingKVCache(8, buffer_size=4), attend),
    "simple": (vision.SimpleKVCache, attend),
    "of a fixed size": (lambda: vision.StaticPrefixKVCache(64), attend),
    "pooled": (lambda: vision.PoolingCache(4), pool),
    "DeepSeek V4.1": (lambda: deepseek_v41.LayerCache(8), slide),
    "DeepSeek V4.1, mlx-vlm": (lambda: DeepseekV41Cache(3), compress),
    "HY V4": (HyV4KVCache, attend),
    "MiniMax M3": (MiniMaxM3KVCache, index_beside),
    "Qwen 4": (QSAKVCache, index),
    "Z1T": (Z1TCache, sum_up),
}


def copied(cache: Any) -> tuple[list[mx.array], Any]:
    arrays, fields = whole.take(cache)
    return [mx.array(array) for array in arrays], json.loads(json.dumps(fields))


@row("S4-11")
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("lengths", [(0,), (1,), (3, 1, 1), (20,), (7, 1, 9, 1)])
def test_an_object_goes_on_like_the_one_that_was_copied(name: str, lengths: tuple[int, ...]) -> None:
    make, feed = MADE[name]
    cache, other = make(), make()
    for num_tokens in lengths:
        if num_tokens:
            mx.eval(feed(cache, num_tokens))
    whole.put(other, *copied(cache))
    assert type(other) is type(cache)
    for num_tokens in (1, 5, 1):
        outputs = []
        for each in (cache, other):
            mx.random.seed(num_tokens)
            outputs.append(feed(each, num_tokens))
        assert len(outputs[0]) == len(outputs[1])
        assert all(mx.array_equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.parametrize("name", MADE)
def test_a_copy_does_not_change_when_its_object_goes_on(name: str) -> None:
    make, feed = MADE[name]
    cache = make()
    mx.eval(feed(cache, 7))
    arrays, fields = copied(cache)
    before = json.dumps(fields)
    mx.eval(feed(cache, 1), feed(cache, 9))
    other = make()
    whole.put(other, arrays, fields)
    mx.eval(feed(other, 1), feed(other, 9))
    assert json.dumps(fields) == before


def test_the_bytes_of_an_object_are_those_of_its_copy() -> None:
    for make, feed in MADE.values():
        cache = make()
        mx.eval(feed(cache, 7))
        assert sum(a.nbytes for a in whole.arrays(cache)) == sum(a.nbytes for a in whole.take(cache)[0]) > 0


@pytest.mark.parametrize(
    "damage",
    [
        None,
        [],
        {},
        {"keys": None},
        {"keys": {"array": 2}, "values": {"array": 1}, "offset": 7},
        {"keys": {"array": -1}, "values": {"array": 1}, "offset": 7},
        {"keys": {"array": "0"}, "values": {"array": 1}, "offset": 7},
        {"keys": {"array": 0}, "values": {"array": 1}, "offset": "7"},
        {"keys": {"array": 0}, "values": {"array": 1}, "offset": 7.5},
        {"keys": {"cache": "KVCache", "fields": {}}, "values": {"array": 1}, "offset": 7},
        {"keys": {"what": 1}, "values": {"array": 1}, "offset": 7},
    ],
)
def test_what_no_object_can_have_left_is_refused(damage: Any) -> None:
    with pytest.raises(ValueError):
        whole.put(text.ConcatenateKVCache(), list(kv(7)), damage)


@pytest.mark.parametrize(
    "kept", [nn.Linear(2, 2), mx.eval, object(), {1: 2}, {1, 2}, type("Slots", (), {"__slots__": ()})()]
)
def test_what_is_no_state_cannot_be_copied(kept: Any) -> None:
    cache = text.ConcatenateKVCache()
    cache.model = kept
    with pytest.raises(whole.CannotCopy, match=r"ConcatenateKVCache\.model"):
        whole.take(cache)


def test_an_array_that_is_kept_twice_is_copied_once() -> None:
    cache = text.ConcatenateKVCache()
    cache.keys = cache.values = kv(3)[0]
    arrays, fields = whole.take(cache)
    assert len(arrays) == 1 and fields["keys"] == fields["values"] == {"array": 0}


def test_classes_that_keep_more_than_the_ones_known_are_copied_whole() -> None:
    class Own(text.KVCache):
        pass

    assert layers.kind(Own()) is layers.kind(HyV4KVCache()) is Kind.OTHER
    assert layers.kind(text.RotatingKVCache(8, keep=4)) is Kind.OTHER
    assert layers.kind(text.RotatingKVCache(8)) is Kind.WINDOW
    assert layers.kind(text.ChunkedKVCache(8)) is layers.kind(vision.ChunkedKVCache(8)) is Kind.CHUNKED
