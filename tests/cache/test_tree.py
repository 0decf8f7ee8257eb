"""Resume points, splits, inserts, trims and damage: one behaviour a test."""

import pytest

from tests.cache.fakes import SPACE, FakeSegment, FakeState, put, resumed, tree_of
from tests.support.integrity import check_integrity
from tests.support.rows import row
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.cache.tree import MemoryAwarePrefixCache

STATES = ResumeRule(needs_state=True)


@row("S4-7")
def test_each_kind_of_hit() -> None:
    tree = tree_of()
    put(tree, range(100))
    assert resumed(tree, range(100)) == ("exact", 99)
    assert resumed(tree, range(50)) == ("supersequence", 49)
    assert resumed(tree, range(120)) == ("prefix", 100)
    assert resumed(tree, [*range(60), 7, 7, 7]) == ("lcp", 60)
    assert resumed(tree, [7, 7]) == ("miss", 0)


@row("S4-7")
def test_never_the_whole_prompt() -> None:
    tree = tree_of()
    put(tree, [5])
    assert resumed(tree, [5]) == ("miss", 0)
    assert resumed(tree, []) == ("miss", 0)
    assert resumed(tree, [5, 6]) == ("prefix", 1)


@row("S4-19")
def test_shared_tokens_are_held_once() -> None:
    tree = tree_of()
    put(tree, range(1000))
    for i in range(10):
        put(tree, [*range(900), -1 % (i + 2), *range(i)], start=0)
    held = sum(entry.end - entry.start for entry in tree.entries())
    assert held < 1000 + 10 * 11


@row("S0-13", "S1-13")
def test_recurrent_state_resumes_only_where_it_was_copied() -> None:
    tree = tree_of(STATES)
    put(tree, range(50), state=FakeState(50))
    put(tree, range(80), start=50)
    assert resumed(tree, range(100)) == ("prefix", 50)
    assert resumed(tree, range(50)) == ("miss", 0)
    assert tree.stats.num_states == 1
    put(tree, range(49), state=FakeState(49))
    assert resumed(tree, range(50)) == ("exact", 49)
    assert tree.stats.num_states == 2


@row("S4-7", "S4-32")
def test_an_identical_prompt_is_exact_behind_which_its_reply_is_stored() -> None:
    tree = tree_of()
    put(tree, range(49))  # a prompt of 50, without its last token
    put(tree, range(80))
    assert resumed(tree, range(50)) == ("exact", 49)
    assert [resumed(tree, range(end))[0] for end in (48, 49, 51, 80)] == [
        "supersequence",
        "exact",
        "supersequence",
        "exact",
    ]


def test_an_insert_whose_beginning_has_gone_is_refused() -> None:
    tree = tree_of()
    put(tree, range(10))
    assert not put(tree, [*range(9), 77, 78], start=10)
    assert tree.stats.inserts_unattached == 1


def test_an_eviction_that_fails_leaves_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of()
    put(tree, range(100))
    tree.set_limit(tree.used_bytes + 700)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(FakeSegment, "split", lambda *_: raise_memory_error())
        put(tree, [7, 7, 7, *range(20)])
    check_integrity(tree)
    tree.set_limit(0)
    assert tree.used_bytes == 0, "everything can still be evicted"


def raise_memory_error() -> None:
    raise MemoryError


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    tree = tree_of(max_bytes=4_000)
    put(tree, range(4))
    match = tree.match(SPACE, pack(range(4)), now=0.0)
    entries = list(tree.entries())
    assert not put(tree, [*range(2), *range(50, 70)])
    assert list(tree.entries()) == entries and tree.stats.inserts_refused == 1
    tree.release(match)
    assert put(tree, [*range(2), *range(50, 53)])


@row("S1-8")
def test_a_pinned_path_is_not_evicted_and_a_release_counts_once() -> None:
    tree = tree_of(STATES)
    put(tree, range(10), state=FakeState(10))
    put(tree, range(20), start=10, state=FakeState(20))
    first = tree.match(SPACE, pack(range(30)), now=0.0)
    second = tree.match(SPACE, pack(range(30)), now=0.0)
    tree.release(first)
    tree.release(first)
    tree.shrink_to(0)
    check_integrity(tree)
    assert resumed(tree, range(30)) == ("prefix", 20)
    assert resumed(tree, range(15)) == ("miss", 0), "the state before it is not needed"
    tree.release(second)
    assert tree.shrink_to(0) == 0


def stored(tree: MemoryAwarePrefixCache, ids: range) -> int:
    """Tokens of it that are held; asking is no use of them."""
    return tree.common_length(SPACE, pack(ids))


@row("S1-3")
def test_what_is_left_of_a_trimmed_path_is_no_younger_than_before() -> None:
    tree = tree_of()
    put(tree, range(50), now=1.0)
    put(tree, range(60), start=50, now=1.0)
    put(tree, range(100, 150), now=500.0)
    tree.trim(SPACE, pack(range(60)), 50)
    assert stored(tree, range(51)) == 50
    tree.shrink_to(tree.used_bytes - 1)
    assert stored(tree, range(51)) < 50 == stored(tree, range(100, 151))


@row("S1-3", "S1-13")
def test_trim_goes_down_to_the_last_resume_point() -> None:
    tree = tree_of(STATES)
    put(tree, range(50), state=FakeState(50))
    put(tree, range(60), start=50)
    put(tree, range(80), start=60, state=FakeState(80))
    tree.trim(SPACE, pack(range(80)), 70)
    assert [(entry.start, entry.end) for entry in tree.entries()] == [(0, 50)]


@row("S1-10")
def test_ten_stripped_thoughts_leave_no_bytes() -> None:
    tree, prompt = tree_of(), list(range(100))
    put(tree, prompt)
    before = tree.used_bytes
    for turn in range(10):
        thought = [*prompt, *(1000 + turn for _ in range(500))]
        put(tree, thought, start=100)
        tree.trim(SPACE, pack(thought), 100)
    assert tree.used_bytes == before


def test_a_lower_limit_evicts_at_once() -> None:
    tree = tree_of(max_bytes=100_000)
    put(tree, range(200))
    tree.set_limit(10_000)
    assert tree.used_bytes <= 10_000
    check_integrity(tree)
    assert tree.stats.evictions == 1


def test_the_number_of_buffers_is_bounded_too():
    tree = MemoryAwarePrefixCache(max_bytes=1 << 30, max_buffers=20, min_cut=1)
    tree.add_model("model", ResumeRule())
    for number in range(40):
        assert put(tree, [number, *range(100, 130)], now=number)
        assert tree.store.used_buffers <= 20
    assert tree.stats.evictions >= 30
    assert resumed(tree, [39, *range(100, 130), 5], now=40) == ("prefix", 31), "the last ones stay"
