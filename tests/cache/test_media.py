"""Encoded images are kept by bytes, the least recently used going first."""

from dataclasses import dataclass

from vllm_mlx.cache.media import MediaCache

A, B, C, D = (("", name) for name in (b"a", b"b", b"c", b"d"))


@dataclass
class Value:
    nbytes: int


def test_the_least_recently_used_goes_first():
    cache = MediaCache(30)
    for name in (A, B, C):
        cache.store(name, Value(10))
    assert cache.get(A) is not None
    cache.store(D, Value(10))
    assert [name in cache for name in (A, B, C, D)] == [True, False, True, True]
    assert cache.used_bytes == 30 and cache.num_evictions == 1 and cache.num_encoded == 4


def test_what_is_too_large_stays_until_the_next():
    cache = MediaCache(5)
    cache.store(A, Value(10))
    assert cache.get(A) is not None and cache.used_bytes == 10
    cache.store(B, Value(3))
    assert A not in cache and cache.used_bytes == 3


def test_it_shrinks_to_what_it_is_told():
    cache = MediaCache(100)
    for name in (A, B, C):
        cache.store(name, Value(10))
    cache.shrink_to(15)
    assert cache.used_bytes == 10 and C in cache
    assert cache.clear() == 10 and len(cache) == 0 and cache.used_bytes == 0


def test_what_is_cleared_is_of_the_salts_that_are_meant():
    cache = MediaCache(100)
    for key in (("ann/", b"a"), ("ann/mine", b"a"), ("ben/", b"a")):
        cache.store(key, Value(10))
    assert cache.clear("ann/") == 20
    assert (("ben/", b"a") in cache, len(cache), cache.used_bytes) == (True, 1, 10)


def test_what_a_step_counts_on_stays_until_it_is_released():
    cache = MediaCache(20)
    cache.store(A, Value(10))
    cache.store(B, Value(10))
    cache.hold(A)
    cache.store(C, Value(10))
    assert [name in cache for name in (A, B, C)] == [True, False, True] and cache.held_bytes == 10
    cache.shrink_to(0)
    assert A in cache and C not in cache
    cache.release()
    cache.shrink_to(0)
    assert len(cache) == cache.used_bytes == cache.held_bytes == 0
