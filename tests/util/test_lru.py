"""The least recently used values are evicted first, within bytes and entries."""

from vllm_mlx.util.lru import LRU


def filled(max_bytes: int, *names: str, max_entries: int | None = None) -> LRU[str, int]:
    """Each value takes ten bytes."""
    store: LRU[str, int] = LRU(max_bytes, max_entries)
    for number, name in enumerate(names):
        store.put(name, number, 10)
    return store


def test_the_least_recently_used_is_evicted_first() -> None:
    store = filled(30, "a", "b", "c")
    assert store.get("a") == 0
    assert store.put("d", 3, 10) == [("b", 1)]
    assert list(store) == ["c", "a", "d"] and store.used_bytes == 30


def test_a_value_that_never_fits_evicts_nothing() -> None:
    store = filled(30, "a", "b")
    assert store.put("a", 5, 31) == [] and list(store) == ["b"]


def test_a_new_value_takes_the_place_of_the_last_one() -> None:
    store = filled(30, "a", "b")
    store.put("a", 7, 20)
    assert store.get("a") == 7 and store.used_bytes == 30 and len(store) == 2


def test_a_smaller_limit_evicts_and_a_larger_one_takes_more() -> None:
    store = filled(30, "a", "b", "c")
    assert [key for key, _ in store.resize(15)] == ["a", "b"]
    store.resize(0)
    assert store.used_bytes == len(store) == 0
    store.resize(10)
    store.put("a", 1, 10)
    assert store.get("a") == 1


def test_entries_are_limited_too() -> None:
    store = filled(1000, "a", "b", "c", max_entries=2)
    assert list(store) == ["b", "c"]


def test_spared_entries_stay_and_retired_ones_are_next() -> None:
    store = filled(40, "a", "b", "c", "d")
    store.retire("d")
    assert [key for key, _ in store.evict(10, spared={"a"})] == ["d", "b", "c"]
    assert store.evict(0, spared={"a"}) == [] and "a" in store


def test_what_is_removed_gives_its_bytes_back() -> None:
    store = filled(40, "a")
    assert store.pop("a") == 0 and store.pop("a") is None and store.get("a") is None
    assert store.used_bytes == 0
