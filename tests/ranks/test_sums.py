"""Sums over two ranks are proven and measured."""

from dataclasses import astuple
from typing import Any

import pytest

from tests.ranks.sessions import ids_that_nobody_needs
from tests.support.two_ranks import together
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.ranks.lockstep import Ranks
from vllm_mlx.ranks.sums import measure_link, prove_sums

WIDTH, CHUNK = 64, 96


def prove_right_and_wrong(ranks: Ranks) -> dict[str, Any]:
    """One link for all, since two ranks take long to start."""
    return {"right": prove_and_measure(ranks), "wrong": prove_a_wrong_link(ranks), "ids": ids_that_nobody_needs(ranks)}


def prove_and_measure(ranks: Ranks) -> list[float]:
    prove_sums(ranks, WIDTH, CHUNK)
    return list(astuple(measure_link(ranks, WIDTH, CHUNK)))


def prove_a_wrong_link(ranks: Ranks) -> str:
    """Rank 1 adds other numbers than rank 0 believes, so that all sums are wrong."""
    try:
        prove_sums(ranks, WIDTH, CHUNK, seed=1000 * ranks.rank)
    except ModelLoadError as error:
        assert ranks.exchange("error", error.message)[0] == error.message
        return error.message
    return "no error"


@pytest.fixture(scope="module")
def both() -> dict[str, Any]:
    found, codes, text = together("tests.ranks.test_sums:prove_right_and_wrong")
    assert codes == [0, 0], text
    return found


def test_right_sums_are_accepted_and_measured(both: dict[str, Any]) -> None:
    assert all(figure > 0 for figure in both["right"])


def test_wrong_sums_end_the_load_on_all_ranks_with_the_same_words(both: dict[str, Any]) -> None:
    expected = "The link between the Macs sums wrongly: rank 0 got wrong numbers for 96 x 64, 1 x 64,"
    assert both["wrong"].startswith(expected)


def test_ids_that_only_rank_0_needs_are_summed_first(both: dict[str, Any]) -> None:
    assert both["ids"] == [3.0] * 7
