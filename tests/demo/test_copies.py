"""Copies in other precisions, made with mlx-vlm's own conversion, answer as well as the original."""

from pathlib import Path

import pytest
from mlx_vlm import convert

from vllm_mlx.demo import demo_path

from .asking import Asker, answer, frozen_cases

PRECISIONS = {"bf16": {"dtype": "bfloat16"}, "8-bit": {"quantize": True, "q_bits": 8, "q_group_size": 64}}
MAX_LOSS = 0.03


@pytest.mark.parametrize("precision", PRECISIONS)
def test_copy_scores_within_three_points(tmp_path: Path, precision: str) -> None:
    folder = tmp_path / precision
    convert(str(demo_path()), str(folder), **PRECISIONS[precision])
    copy, cases = Asker(folder), frozen_cases()
    right = [answer(copy.reply(case)) == answer(case.reply) for case in cases]
    missed = [case.name for case, good in zip(cases, right, strict=True) if not good]
    assert len(missed) <= MAX_LOSS * len(cases), missed
