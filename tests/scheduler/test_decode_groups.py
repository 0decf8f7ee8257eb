"""Groups hold every row once, pad little, and change seldom."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mlx.core.memory import ALLOCATION_STEP
from vllm_mlx.scheduler.decode_groups import MAX_PADDING_SHARE, padding, regroup

lengths_by_row = st.dictionaries(st.integers(0, 40), st.integers(1, 60_000), max_size=16)


def limit(lengths: list[int]) -> float:
    return max(MAX_PADDING_SHARE * sum(lengths), ALLOCATION_STEP * len(lengths))


@settings(max_examples=400, deadline=None)
@given(lengths_by_row, lengths_by_row)
def test_every_row_is_in_exactly_one_group_and_padding_stays_under_the_limit(before, after):
    groups = regroup(regroup([], before), after)
    assert sorted(row for group in groups for row in group) == sorted(after)
    for group in groups:
        lengths = [after[row] for row in group]
        assert padding(lengths) <= limit(lengths)


@settings(max_examples=200, deadline=None)
@given(lengths_by_row)
def test_grouping_again_without_news_changes_nothing(lengths):
    groups = regroup([], lengths)
    again = regroup(groups, lengths)
    assert {frozenset(group) for group in regroup(again, lengths)} == {frozenset(group) for group in again}


def test_a_long_row_does_not_pad_short_ones():
    lengths = {0: 30_000, **dict.fromkeys(range(1, 8), 1_000)}
    assert sorted(map(sorted, regroup([], lengths))) == [[0], [1, 2, 3, 4, 5, 6, 7]]


def test_rows_of_one_length_share_a_group():
    assert len(regroup([], dict.fromkeys(range(8), 5_000))) == 1


def test_short_rows_share_a_group_whatever_their_ratio():
    assert len(regroup([], {0: 10, 1: 200, 2: 90})) == 1


def test_a_group_that_lost_its_middle_rows_splits_once_its_padding_shows():
    lengths = {**dict.fromkeys(range(9), 10_000), 9: 4_000}
    assert len(regroup([tuple(range(10))], lengths)) == 1
    assert len(regroup([tuple(range(10))], {0: 10_000, 9: 4_000})) == 2


def test_groups_that_grew_alike_become_one():
    assert len(regroup([(0,), (1,)], {0: 20_000, 1: 19_500})) == 1
