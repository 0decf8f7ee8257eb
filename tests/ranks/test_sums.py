"""Sums over two ranks are proven and measured."""

from dataclasses import astuple

from tests.support.two_ranks import together
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.ranks.lockstep import Ranks
from vllm_mlx.ranks.sums import measure_link, prove_sums

WIDTH, CHUNK = 64, 96


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


def test_right_sums_are_accepted_and_measured() -> None:
    link, codes, text = together("tests.ranks.test_sums:prove_and_measure")
    assert codes == [0, 0], text
    assert all(figure > 0 for figure in link)


def test_wrong_sums_end_the_load_on_all_ranks_with_the_same_words() -> None:
    message, codes, text = together("tests.ranks.test_sums:prove_a_wrong_link")
    assert codes == [0, 0], text
    assert message.startswith("The link between the Macs sums wrongly: rank 0 got wrong numbers for 96 x 64, 1 x 64,")
