"""A deadline that every thread of a request can ask."""

import pytest

from vllm_mlx.core.errors import Cancelled, TimeLimit
from vllm_mlx.util.tasks import Deadline


def test_work_goes_on_until_its_time_is_over() -> None:
    now = 100.0
    deadline = Deadline(2.0, "It took longer than 2 s (--limit).", clock=lambda: now)
    now = 101.5
    deadline.check()
    assert deadline.remaining_s == 0.5
    now = 102.0
    with pytest.raises(TimeLimit, match="--limit"):
        deadline.check()
    assert deadline.remaining_s == 0


def test_cancelled_work_ends_at_its_next_check() -> None:
    deadline = Deadline(60.0, "It took too long.")
    deadline.cancel()
    assert deadline.remaining_s == 0
    with pytest.raises(Cancelled):
        deadline.check()


def test_work_that_was_cancelled_since_its_time_was_over_names_the_limit() -> None:
    deadline = Deadline(0.0, "It took longer than 0 s (--limit).")
    deadline.cancel()
    with pytest.raises(TimeLimit, match="--limit"):
        deadline.check()
