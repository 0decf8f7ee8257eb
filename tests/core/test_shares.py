"""What is bounded for all tenants together: one alone has all of it, and each finds its share whatever others do."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.util.tenants import has_room


@given(st.integers(1, 40), st.lists(st.integers(1, 5), max_size=60))
def test_one_tenant_alone_has_all_of_it_and_no_more(limit: int, amounts: list[int]) -> None:
    held: Counter[str] = Counter()
    for amount in amounts:
        fits = held["ann"] + amount <= limit
        assert has_room(held, "ann", amount, limit) == fits
        held["ann"] += amount * fits


@given(st.integers(4, 40), st.integers(0, 200))
def test_a_tenant_finds_its_share_however_much_another_holds(limit: int, num_held: int) -> None:
    held = Counter(ann=num_held)
    while held["ben"] < limit // 2:
        assert has_room(held, "ben", 1, limit)
        held["ben"] += 1
    assert has_room(held, "ben", 1, limit) == (sum(held.values()) < limit)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=400))
def test_together_they_hold_about_twice_the_limit_at_most(steps: list[tuple[str, bool]]) -> None:
    held: Counter[str] = Counter()
    for tenant, is_back in steps:
        if is_back and held[tenant]:
            held[tenant] -= 1
        elif has_room(held, tenant, 1, 12):
            held[tenant] += 1
        assert sum(held.values()) <= 12 + 12 // 2 + 12 // 3 + 12 // 4
