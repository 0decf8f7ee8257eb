"""One model on two ranks replies as one process does, and both ranks do the same."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.two_ranks import together
from vllm_mlx.runner.libraries import load_model

from .links import PROMPT
from .test_shards import CUT, shard


def session(name: str, path: Path, **arguments: Any) -> Any:
    result, codes, text = together(f"tests.ranks.sessions:{name}", path=str(path), **arguments)
    assert codes == [0, 0], text
    return result


FEW_HYBRID = {"num_hidden_layers": 2, "full_attention_interval": 2}  # each layer waits twice for the other rank
NUM_PLANS = 20


# One start of two ranks


@pytest.fixture(scope="module")
def once(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    cut = [str(checkpoint(name)) for name in CUT]
    options = {"cut": cut, "num_plans": NUM_PLANS, "seed": 30, "failing": 1, "is_apart": True}
    found: dict[str, Any] = session("once", checkpoint("qwen3_5", **FEW_HYBRID), **options)
    return found


def test_right_sums_are_accepted_and_measured(once: dict[str, Any]) -> None:
    assert all(figure > 0 for figure in once["right sums"])


def test_wrong_sums_end_the_load_on_all_ranks_with_the_same_words(once: dict[str, Any]) -> None:
    expected = "The link between the Macs sums wrongly: rank 0 got wrong numbers for 96 x 64, 1 x 64,"
    assert once["wrong sums"].startswith(expected)


def test_ids_that_only_rank_0_needs_are_summed_first(once: dict[str, Any]) -> None:
    assert once["ids"] == [3.0] * 7


@pytest.mark.parametrize("name", CUT)
def test_what_is_accepted_runs_and_takes_what_was_computed(
    once: dict[str, Any], checkpoint: Callable[..., Path], name: str
) -> None:
    best, num_bytes, per_token = once["shards"][CUT.index(name)]
    assert best == mx.argmax(load_model(checkpoint(name))[0](PROMPT)[0, -1]).item()
    computed = shard(checkpoint(name), 2)
    assert (num_bytes, per_token) == (computed.weights_bytes, computed.footprint.bytes_per_token)


def test_replies_equal_those_of_one_process(once: dict[str, Any]) -> None:
    check_replies(once["replies"], once["one"])


def test_both_ranks_do_and_keep_the_same(once: dict[str, Any]) -> None:
    check_plans(once, NUM_PLANS)


def test_what_one_rank_alone_cannot_hold_is_used_by_none(once: dict[str, Any]) -> None:
    check_held(once["unlike"], once["memory"])


def check_replies(ranks: dict[str, Any], one: dict[str, Any]) -> None:
    for kind in one.keys() - {"drawn"}:
        assert ranks[kind] == one[kind], kind
    for ours, theirs in zip(ranks["drawn"], one["drawn"], strict=True):
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], abs=1e-3)
    assert min(ranks["cached"]) > 100 and ranks["preemptions"] > 0


def check_plans(found: dict[str, Any], num_plans: int) -> None:
    ours, theirs = found["notes"]
    assert len(ours) >= num_plans and ours == theirs
    assert found["wrong"] == []
    assert found["beyond"] <= 200
    assert found["left"] == 0


def check_held(found: dict[str, Any], memory: int) -> None:
    assert found["ranks"] == found["one"]
    assert memory == 1 << 29, "the worker's"
    assert found["cached"] == [0, 0, 0, 200], "the third one found state that one rank could not restore"


# The long form: a start for each


LONG = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5")


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "options"), [*((name, {}) for name in LONG), ("qwen3", {"bits": 4, "head_dim": 32})], ids=str
)
def test_replies_of_every_family_equal_those_of_one_process(
    checkpoint: Callable[..., Path], architecture: str, options: dict[str, Any]
) -> None:
    found = session("once", checkpoint(architecture, **options))
    check_replies(found["replies"], found["one"])
    check_plans(found, 0)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_both_ranks_do_and_keep_the_same_for_long(checkpoint: Callable[..., Path], architecture: str) -> None:
    found = session("once", checkpoint(architecture), num_plans=200, seed=200)
    check_plans(found, 200)
    assert found["hits"] > 0


@pytest.mark.full
def test_what_rank_0_alone_cannot_hold_is_used_by_none(checkpoint: Callable[..., Path]) -> None:
    found = session("once", checkpoint("qwen3_5", **FEW_HYBRID), failing=0)
    check_plans(found, 0)
    check_held(found["unlike"], found["memory"])


@pytest.mark.full
def test_a_load_that_hangs_on_one_rank_ends_all(checkpoint: Callable[..., Path]) -> None:
    result, codes, text = together("tests.ranks.sessions:hanging_load", path=str(checkpoint("qwen3")))
    assert (result, codes) == (None, [75, 75])
    assert re.search(r"Rank 0 or 1 has hung for \d s after part 3 of its load", text), text


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 4])
def test_a_lost_worker_ends_the_engine(checkpoint: Callable[..., Path], number: int) -> None:
    reason, codes, text = together("tests.ranks.sessions:lost_worker", path=str(checkpoint("qwen3")), number=number)
    if codes[0] == 75:  # the watch noticed it first
        assert "Rank 1 (127.0.0.1) is lost" in text
    else:
        assert reason is not None and "restart of all ranks" in reason


@pytest.mark.full
def test_a_step_that_fails_after_its_plan_was_sent_ends_the_engine(checkpoint: Callable[..., Path]) -> None:
    reason = session("interrupted_step", checkpoint("qwen3"))
    assert reason == "RanksParted: A step of this rank failed after its plan was sent."
