"""Long values are what they were after they were packed."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.disk.packed import packed_ids, unpacked_ids


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids(ids: list[int]) -> None:
    assert unpacked_ids(packed_ids(ids)) == array("I", ids)


def test_ids_take_little_room() -> None:
    ids = np.random.default_rng(0).integers(0, 150_000, 10_000).tolist()
    assert len(packed_ids(ids)) < 3.2 * len(ids)


@pytest.mark.parametrize("word", ["!", "AAAA", packed_ids([1, 2, 3])[:-4], "é"])
def test_what_cannot_be_unpacked_is_a_value_error(word: str) -> None:
    with pytest.raises(ValueError):
        unpacked_ids(word)
