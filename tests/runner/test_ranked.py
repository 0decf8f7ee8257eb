"""A shard of a model: which collective comes first, and what becomes of a proof that fails on one rank."""

from collections.abc import Callable
from pathlib import Path

from tests.support.two_ranks import together


def test_a_proof_that_fails_on_one_rank_ends_the_load_of_all(checkpoint: Callable[..., Path]) -> None:
    result, codes, text = together("tests.ranks.sessions:failing_proof", path=str(checkpoint("qwen3")), limit_s=60)
    assert (result, codes) == (None, [1, 1])
    assert text.count("A proof failed on rank 1 alone: ValueError: this rank alone cannot prove it") >= 2


def test_ids_that_only_rank_0_needs_are_summed_first(tmp_path: Path) -> None:
    result, codes, text = together("tests.ranks.sessions:ids_that_nobody_needs", path=str(tmp_path), limit_s=60)
    assert (result, codes) == ([3.0] * 7, [0, 0]), text
