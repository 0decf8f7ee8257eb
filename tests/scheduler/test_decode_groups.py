"""Groups hold every row once, pad little, and change seldom."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mlx.core.memory import ALLOCATION_STEP, RowFootprint
from vllm_mlx.scheduler.decode_groups import MAX_PADDING_SHARE, DecodeGroups, padding, regroup

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


def sharing() -> DecodeGroups:
    """Groups of a model so small that every copy is cheap."""
    return DecodeGroups(RowFootprint(bytes_per_token=1), can_batch=True, shares_forward=True)


def test_groups_that_share_a_forward_pass_stay_as_they_are_if_memory_is_short():
    lengths = {0: 1000, 1: 900}
    groups, padded = sharing(), 100
    for _ in range(3):
        assert len(groups.plan(lengths, free_bytes=lambda: 2 * padded - 1)) == 2
    assert groups.plan(lengths, free_bytes=lambda: 2 * padded) == [(1, 0)]


MEGABYTE = 1 << 20


def read(group: list[int]) -> float:
    """Bytes of padding that a layer of `wide` reads in a step."""
    return 4096 * padding(group)


def wide() -> DecodeGroups:
    """Groups of a model of 4 kB a token and layer, as Qwen3 8B: 1,024 tokens are read while one more group starts."""
    return DecodeGroups(RowFootprint(bytes_per_token=8192, num_layers=2), can_batch=True, shares_forward=True)


def planned(groups: DecodeGroups, *lengths: int) -> list[list[int]]:
    for _ in range(200):
        plan = groups.plan(dict(enumerate(lengths)))
    return sorted(sorted(lengths[row] for row in group) for group in plan)


def test_a_merge_costs_less_than_the_padding_that_is_read() -> None:
    """A share of all tokens would say the opposite in the first two cases."""
    assert planned(wide(), 7_000, 7_900) == [[7_000], [7_900]]  # 6 % of padding: 3.5 MB a layer and step
    assert planned(wide(), 20, 520) == [[20, 520]]  # 93 %: 2 MB
    assert planned(wide(), 7_000, 7_300) == [[7_000, 7_300]]


def test_rows_that_would_need_a_mask_do_not_merge_where_it_takes_the_faster_kernel() -> None:
    assert planned(wide(), 9_000, 9_001) == [[9_000], [9_001]]
    assert planned(wide(), 9_000, 9_000) == [[9_000, 9_000]]


def test_they_divide_once_their_padding_costs_more_than_the_groups() -> None:
    groups, lengths = wide(), (100, 600, 850, 1_000, 1_120, 1_200)
    for num_rows in range(1, len(lengths) + 1):
        assert planned(groups, *lengths[:num_rows]) == [[*lengths[:num_rows]]]
    for row in (1, 2, 3, 4):
        groups.leave(row)
    assert sorted(groups.plan({0: 100, 5: 1_200})) == [(0,), (5,)]  # 1,100 tokens


@settings(max_examples=100, deadline=None)
@given(st.lists(lengths_by_row, max_size=6))
def test_their_padding_is_read_in_less_time_than_their_groups_would_take(plans):
    groups = wide()
    for lengths in plans:
        for _ in range(3):
            plan = groups.plan(lengths)
        assert sorted(row for group in plan for row in group) == sorted(lengths)
        for group in plan:
            assert read([lengths[row] for row in group]) <= 4 * MEGABYTE * (len(group) - 1)


def kept_apart() -> tuple[DecodeGroups, dict[int, int]]:
    """Two groups of a model whose groups share no forward pass: unlike rows, of which the shorter one catches up."""
    groups = DecodeGroups(RowFootprint(bytes_per_token=1), can_batch=True, shares_forward=False)
    lengths = {0: 20_000, 1: 1_000}
    assert sorted(groups.plan(lengths)) == [(0,), (1,)]
    return groups, lengths | {1: 19_900}


def test_groups_that_grew_alike_are_merged_now_and_then_and_not_in_every_step() -> None:
    """To look costs time, and a merge copies all rows. A row that joins or leaves changes the groups immediately."""
    groups, lengths = kept_apart()
    plans = [groups.plan(lengths) for _ in range(256)]
    merged = [len(plan) == 1 for plan in plans]
    first = merged.index(True)
    assert 48 <= first <= 64 and all(merged[first:]), "soon, and for good"
    groups, lengths = kept_apart()
    groups.plan(lengths)
    assert sorted(map(sorted, groups.plan(lengths | {2: 19_800}))) == [[0, 1, 2]]


def test_no_plan_says_that_groups_were_merged_unless_rows_may_have_moved() -> None:
    """What has merged needs memory for its padding, for which cached state would be evicted."""
    groups, lengths = kept_apart()
    said = [groups.plan(lengths) and groups.has_merged for _ in range(256)]
    assert 1 <= sum(said) <= 8


def first_merged(groups: DecodeGroups, lengths: dict[int, int]) -> int | None:
    """The plans before the first one in which two rows share a group, of 200."""
    return next((number for number in range(200) if len(groups.plan(lengths)) == 1), None)


def test_groups_that_share_a_forward_pass_wait_until_their_copy_pays() -> None:
    assert first_merged(wide(), {0: 100, 1: 100}) == 1
    for num_tokens in (1_000, 4_000, 8_000):  # the time of a step more for each 2 MB that a layer copies
        waited = first_merged(wide(), {0: num_tokens, 1: num_tokens})
        assert waited is not None and abs(waited - 2 * 4096 * num_tokens / (2 * MEGABYTE)) <= 2
    assert first_merged(wide(), {0: 20_000, 1: 20_000}) is None, "it would not pay within their usual life"


def test_a_row_with_drafts_stays_alone_for_some_plans_after_its_last_draft() -> None:
    groups, lengths = wide(), {0: 100, 1: 100}
    assert first_merged(groups, lengths) == 1
    groups.plan(lengths, drafting=[0])
    apart = first_merged(groups, lengths)
    assert apart is not None and 48 <= apart <= 80
