"""One model on two ranks replies as one process does, and both ranks do the same."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.two_ranks import together


def session(name: str, path: Path, **arguments: Any) -> Any:
    result, codes, text = together(f"tests.ranks.sessions:{name}", path=str(path), **arguments)
    assert codes == [0, 0], text
    return result


FEW: dict[str, Any] = {"num_hidden_layers": 2}  # each layer waits twice for the other rank
FEW_HYBRID = {**FEW, "full_attention_interval": 2}
SHORT = [("qwen3", FEW, {"apart": True}), ("qwen3_5", FEW_HYBRID, {})]
LONG = [(name, {}, {}) for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3")]
QUANTISED = [("qwen3", {"bits": 4, "head_dim": 32}, {})]


@pytest.mark.parametrize(
    ("architecture", "options", "arguments"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.full) for case in [*LONG, *QUANTISED])],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_replies_equal_those_of_one_process(
    checkpoint: Callable[..., Path], architecture: str, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    found = session("everything", checkpoint(architecture, **options), **arguments)
    ranks, one = found["ranks"], found["one"]
    for kind in one:
        assert ranks[kind] == one[kind], kind
    assert min(ranks["cached"]) > 100 and ranks["preemptions"] > 0
    assert found["left"] == 0


@pytest.mark.parametrize(
    ("architecture", "num_plans"),
    [("qwen3", 30), *(pytest.param(name, 200, marks=pytest.mark.full) for name in ("qwen3", "qwen3_5"))],
)
def test_both_ranks_do_and_keep_the_same(checkpoint: Callable[..., Path], architecture: str, num_plans: int) -> None:
    options = FEW if num_plans < 200 else {}
    found = session("random_plans", checkpoint(architecture, **options), num_plans=num_plans, seed=num_plans)
    ours, theirs = found["notes"]
    assert len(ours) >= num_plans and ours == theirs
    assert found["wrong"] == [] and found["hits"] > 0
    assert found["beyond"] <= 200
    assert found["left"] == 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_what_one_rank_alone_cannot_hold_is_used_by_none(checkpoint: Callable[..., Path], rank: int) -> None:
    found = session("unlike_ranks", checkpoint("qwen3_5", **FEW_HYBRID), rank=rank)
    ours, theirs = found["notes"]
    assert ours == theirs
    assert found["ranks"] == found["one"]
    assert found["memory"] == 1 << 29, "the worker's"
    assert found["cached"] == [0, 0, 0, 200], "the third one found state that one rank could not restore"


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
