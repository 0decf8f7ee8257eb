"""What one model may take of the budget, alone and beside other models."""

import pytest

from vllm_mlx.core.errors import ConfigError
from vllm_mlx.core.memory import Budget, MemoryBudget

GB = 10**9


def test_weights_that_do_not_fit_are_refused_with_the_arithmetic() -> None:
    Budget(24 * GB).check_weights("a", 24 * GB)
    Budget(24 * GB, 20 * GB).check_weights("a", 4 * GB)
    with pytest.raises(ConfigError, match=r"weights of a take 25\.0 GB, the budget is 24\.0 GB\. Use a smaller"):
        Budget(24 * GB).check_weights("a", 25 * GB)
    with pytest.raises(ConfigError, match=r"the budget is 24\.0 GB, of which other models hold 20\.0 GB\. Use"):
        Budget(24 * GB, 20 * GB).check_weights("a", 5 * GB)


def test_what_others_hold_is_not_left_for_rows() -> None:
    parts = {"total_bytes": 24 * GB, "weights_bytes": 3 * GB, "transient_bytes": GB}
    assert MemoryBudget(**parts).rows_bytes == 20 * GB
    assert MemoryBudget(**parts, held_bytes=18 * GB).rows_bytes == 2 * GB
    with pytest.raises(ConfigError, match=r"the budget is 24\.0 GB, of which other models hold 20\.0 GB\."):
        MemoryBudget(**parts, held_bytes=20 * GB)


def test_the_parts_for_each_purpose_are_shares_of_the_whole() -> None:
    alone, beside = Budget(64 * GB), Budget(64 * GB, 40 * GB)
    assert (alone.scores_bytes, alone.forced_bytes, alone.inputs_bytes) == (4 * GB, 2 * GB, GB)
    assert (beside.scores_bytes, beside.forced_bytes, beside.inputs_bytes) == (4 * GB, 2 * GB, GB)
    assert beside.free_bytes == 24 * GB
