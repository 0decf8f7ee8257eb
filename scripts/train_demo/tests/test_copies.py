"""Copies in other precisions, made with mlx-vlm's own conversion, answer as well as the original."""

from pathlib import Path

import pytest
from mlx_vlm import convert

from scripts.train_demo import scoring
from tests.support.demo_cases import Asker, answer, frozen_cases
from vllm_mlx.runner.checkpoint import DEMO_PATH

PRECISIONS = {"bf16": {"dtype": "bfloat16"}, "8-bit": {"quantize": True, "q_bits": 8, "q_group_size": 64}}
MAX_LOSS = 0.03
SEED, PER_SKILL = 7_001, 20


@pytest.fixture(scope="module", params=PRECISIONS)
def copied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies") / request.param
    convert(str(DEMO_PATH), str(folder), **PRECISIONS[request.param])
    return folder


@pytest.fixture(scope="module")
def original() -> float:
    return overall(DEMO_PATH)


def overall(folder: Path) -> float:
    """Return the share that is right of a few new questions on every skill."""
    asked = scoring.Greedy(folder)
    return scoring.score(scoring.judged(asked, item) for item in scoring.items(SEED, PER_SKILL)).overall()


@pytest.mark.full
def test_copy_answers_the_frozen_prompts(copied: Path) -> None:
    copy, cases = Asker(copied), frozen_cases()
    right = [answer(copy.reply(case)) == answer(case.reply) for case in cases]
    missed = [case.name for case, good in zip(cases, right, strict=True) if not good]
    assert len(missed) <= MAX_LOSS * len(cases), missed


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_copy_scores_within_three_points(copied: Path, original: float) -> None:
    assert overall(copied) >= original - MAX_LOSS
