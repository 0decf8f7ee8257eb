"""What cache/ relies on in mlx-lm's cache classes. A failure here names the upstream promise that broke."""

import mlx.core as mx
from mlx_lm.models import cache as upstream


def kv(num_tokens: int, rows: int = 1) -> tuple[mx.array, mx.array]:
    keys = mx.arange(rows * 2 * num_tokens * 4, dtype=mx.float32).reshape(rows, 2, num_tokens, 4)
    return keys, keys + 1000


def test_a_kv_cache_can_be_filled_by_hand_and_goes_on():
    cache, other = upstream.KVCache(), upstream.KVCache()
    keys, values = kv(10)
    other.update_and_fetch(keys, values)
    cache.keys, cache.values = (mx.pad(array, [(0, 0), (0, 0), (0, 20), (0, 0)]) for array in (keys, values))
    cache.offset = 10
    more = kv(3)
    for ours, theirs in zip(cache.update_and_fetch(*more), other.update_and_fetch(*more), strict=True):
        assert mx.array_equal(ours, theirs)
    assert cache.keys.shape[2] == 30, "a buffer with room is written in place"


def test_a_rotating_cache_can_be_filled_with_its_last_tokens_and_goes_on():
    for num_tokens in (5, 8, 20):
        cache, other = upstream.RotatingKVCache(8), upstream.RotatingKVCache(8)
        keys, values = kv(num_tokens)
        other.update_and_fetch(keys, values)
        first = max(0, num_tokens - 8)
        cache.keys, cache.values = keys[:, :, first:], values[:, :, first:]
        cache.offset, cache._idx = num_tokens, num_tokens - first
        for size in (3, 1, 1, 4, 1):
            more = kv(size)
            cache.update_and_fetch(*more)
            other.update_and_fetch(*more)
            ours, theirs = (c._temporal_order(c.keys)[:, :, -8:] for c in (cache, other))
            assert mx.array_equal(ours, theirs)
            assert cache.offset == other.offset


def test_batch_caches_are_padded_on_the_left_to_the_longest_row():
    rows = []
    for num_tokens in (4, 9):
        row = upstream.KVCache()
        row.update_and_fetch(*kv(num_tokens))
        rows.append(row)
    batch = upstream.KVCache.merge(rows)
    assert batch.size() == 9
    assert mx.array_equal(batch.keys[0:1, :, 5:9], rows[0].keys[:, :, :4])
    batch.update_and_fetch(*kv(1, rows=2))
    assert batch.size() == 10
    assert mx.array_equal(batch.extract(0).keys[:, :, :4], rows[0].keys[:, :, :4])


def test_a_batch_of_windows_gives_back_each_rows_last_tokens():
    rows = []
    for num_tokens in (3, 20):
        row = upstream.RotatingKVCache(8)
        row.update_and_fetch(*kv(num_tokens))
        rows.append(row)
    batch = upstream.RotatingKVCache.merge(rows)
    batch.update_and_fetch(*kv(1, rows=2))
    assert batch.extract(0).keys.shape[2] == 4
    assert batch.extract(1).keys.shape[2] == 8
    assert batch.extract(1).offset == 21


def test_recurrent_state_is_a_list_of_arrays_by_row():
    rows = []
    for value in (1.0, 2.0):
        row = upstream.ArraysCache(2)
        row[0], row[1] = mx.full((1, 3), value), mx.zeros((1, 2, 2))
        rows.append(row)
    batch = upstream.ArraysCache.merge(rows)
    assert mx.array_equal(batch.cache[0], mx.array([[1.0] * 3, [2.0] * 3]))
    assert mx.array_equal(batch.extract(1).cache[0], mx.array([[2.0] * 3]))
