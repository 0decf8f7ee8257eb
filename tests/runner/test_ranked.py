"""A shard of a model: what becomes of a proof that fails on one rank."""

from collections.abc import Callable
from pathlib import Path

from tests.support.two_ranks import together


def test_a_proof_that_fails_on_one_rank_ends_the_load_of_all(checkpoint: Callable[..., Path]) -> None:
    result, codes, text = together(
        "tests.ranks.sessions:failing_proof", path=str(checkpoint("qwen3", num_hidden_layers=1))
    )
    assert (result, codes) == (None, [1, 1])
    assert text.count("A proof failed on rank 1 alone: ValueError: this rank alone cannot prove it") >= 2
