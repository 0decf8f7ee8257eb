"""Who goes first when room is needed."""

from tests.cache.fakes import SPACE, FakeState, put, resumed, tree_of
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.node import ResumeRule

STATES = ResumeRule(needs_state=True)


def test_a_shared_system_prompt_outlives_one_shot_requests_of_its_age() -> None:
    tree = tree_of()
    for turn in range(4):
        put(tree, [*range(100), 200 + turn], now=0.0)
        resumed(tree, [*range(100), 300 + turn], now=0.0)
    for other in range(4):
        put(tree, [400 + other, *range(50)], now=0.0)
    put(tree, [999], now=3600.0)
    tree.shrink_to(tree.used_bytes - 4 * 50 * 250)
    assert resumed(tree, [*range(100), 1], now=3600.0)[1] == 100


def test_of_two_beginnings_as_old_the_short_one_outlives_the_long_one() -> None:
    tree = tree_of()
    put(tree, [1] * 8000, now=0.0)
    put(tree, [2] * 400, now=0.0)
    put(tree, [999], now=3600.0)
    tree.shrink_to(tree.used_bytes - 10_000)
    assert resumed(tree, [2] * 400)[1] == 399 and resumed(tree, [1] * 8000)[1] < 7990


def test_a_state_others_resumed_from_outlives_one_of_the_same_age() -> None:
    tree = tree_of(STATES)
    for first in (0, 1):
        put(tree, [first, *range(50)], state=FakeState(51, 50_000), now=0.0)
        put(tree, [first, *range(500)], start=51, state=FakeState(501, 50_000), now=0.0)
    resumed(tree, [1, *range(50), 7], now=0.0)
    tree.shrink_to(tree.used_bytes - 1)
    assert resumed(tree, [0, *range(50), 7]) == ("miss", 0)
    assert resumed(tree, [1, *range(50), 7])[1] == 51


def test_the_copy_just_before_a_later_one_goes_first() -> None:
    tree = tree_of(STATES)
    put(tree, range(1000), state=FakeState(1000, 500_000))
    put(tree, range(1003), start=1000, state=FakeState(1003, 500_000))
    put(tree, range(2000), start=1003, state=FakeState(2000, 500_000))
    tree.shrink_to(tree.used_bytes - 1)
    assert [entry.end for entry in tree.entries() if entry.state_bytes] == [1000, 2000]


def test_one_long_conversation_gives_up_its_earlier_states_for_the_next() -> None:
    tree = tree_of(STATES, max_bytes=110_000)
    for end in range(10, 200, 10):
        assert put(tree, range(end), start=end - 10, state=FakeState(end, 5_000), now=float(end))
        assert tree.used_bytes <= 110_000 and resumed(tree, range(end + 5), now=float(end))[1] == end


def test_tokens_of_a_slow_model_outlive_those_of_a_fast_one() -> None:
    tree = tree_of()
    tree.add_model("slow", ResumeRule(), s_per_token=1.0)
    put(tree, range(100), space=("slow", ""), now=0.0)
    put(tree, range(100), now=50.0)
    tree.shrink_to(tree.used_bytes * 2 // 3)
    assert resumed(tree, range(100), space=("slow", ""), now=50.0)[1] == 99
    assert resumed(tree, range(100), now=50.0)[1] < 99


def test_what_is_kept_elsewhere_too_goes_first_if_it_is_read_sooner_than_computed() -> None:
    for read_bytes_per_s, lost in ((1e12, 500), (1.0, 0)):
        tree = tree_of()
        put(tree, range(100), now=0.0)
        put(tree, range(500, 600), now=50.0)
        tree.mark_copied(SPACE, pack(range(500, 600)))
        tree.read_bytes_per_s = read_bytes_per_s
        tree.shrink_to(tree.used_bytes * 2 // 3)
        for first in (0, 500):
            assert (resumed(tree, range(first, first + 100), now=50.0)[1] < 99) == (first == lost)


def test_what_was_used_elsewhere_is_young_again() -> None:
    tree = tree_of()
    put(tree, range(100), now=0.0)
    put(tree, range(500, 600), now=10.0)
    tree.touch(SPACE, pack(range(50)), now=1000.0)
    tree.shrink_to(tree.used_bytes * 2 // 3)
    assert resumed(tree, range(100), now=1000.0)[1] == 99


def test_turns_of_one_conversation_are_no_forks() -> None:
    tree = tree_of()
    for end in range(100, 200, 10):
        put(tree, range(end), start=end - 10 if end > 100 else 0, now=0.0)
    put(tree, [*range(500, 600), 1], now=0.0)
    put(tree, [*range(500, 600), 2], now=0.0)
    assert sorted(node.forks for node in tree.store.nodes() if node.start == 0) == [0, 1]
