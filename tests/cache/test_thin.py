"""Old state copies of a growing conversation go; what others share and the newest stay."""

from tests.support.integrity import check_integrity
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.cache.tree import MemoryAwarePrefixCache

from .fakes import FakeSegment, FakeState

SPACE = ("model", "")


def tree_with_turns(ends: list[int]) -> MemoryAwarePrefixCache:
    tree = MemoryAwarePrefixCache(max_bytes=1 << 30)
    tree.add_model("model", ResumeRule(needs_state=True))
    start = 0
    for now, end in enumerate(ends):
        segment = FakeSegment(tuple(range(start, end)), start, start)
        key = pack(range(end))
        state = FakeState(end)
        assert tree.insert(SPACE, key, start=start, segment=segment, window_start=start, state=state, now=now)
        start = end
    return tree


def resume_points(tree: MemoryAwarePrefixCache, length: int) -> list[int]:
    points = []
    for end in range(length, 0, -1):
        match = tree.match(SPACE, pack([*range(end), 10**6]), now=99)
        tree.release(match)
        if match.length and match.length not in points:
            points.append(match.length)
    return sorted(points)


def test_all_but_the_first_and_the_newest_go():
    tree = tree_with_turns([10, 20, 30, 40, 50, 60])
    assert tree.thin(SPACE, pack(range(60)), keep_last=2) > 0
    check_integrity(tree)
    assert resume_points(tree, 60) == [10, 50, 60]


def test_a_point_that_is_still_asked_for_stays():
    tree = tree_with_turns([10, 20, 30, 40, 50, 60])
    tree.thin(SPACE, pack(range(60)), keep_last=1, keep=(30, 35))
    check_integrity(tree)
    assert resume_points(tree, 60) == [10, 30, 60]


def test_a_point_where_paths_part_stays():
    tree = tree_with_turns([10, 20, 30, 40, 50])
    other = pack([*range(30), 777])
    segment = FakeSegment((777,), 30, 30)
    assert tree.insert(SPACE, other, start=30, segment=segment, window_start=30, state=FakeState(31), now=9)
    tree.thin(SPACE, pack(range(50)), keep_last=1)
    check_integrity(tree)
    assert resume_points(tree, 50) == [10, 30, 50]


def test_a_point_a_little_before_paths_part_stays():
    tree = tree_with_turns([10, 20, 100, 130, 140, 150])
    tree.insert(
        SPACE,
        pack([*range(135), 777]),
        start=130,
        segment=FakeSegment((*range(130, 135), 777), 130, 130),
        window_start=130,
        state=None,
        now=9,
    )
    tree.thin(SPACE, pack(range(150)), keep_last=1)
    check_integrity(tree)
    assert resume_points(tree, 150) == [10, 130, 150]


def test_nothing_goes_while_there_are_few():
    tree = tree_with_turns([10, 20, 30])
    assert tree.thin(SPACE, pack(range(30)), keep_last=2) == 0
    assert tree.thin(SPACE, pack(range(30)), keep_last=5) == 0
    assert tree.thin(SPACE, pack([5]), keep_last=0) == 0
