"""Operations that nobody evaluates do not pile up behind the state of rows, however long they decode.

MLX keeps a buffer for each of them, and stops at 499,000 buffers (mlx/backend/metal/allocator.cpp).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.checkpoints import ARCHITECTURES, PARTLY_ROTARY
from tests.support.engine_driver import Driver, plain_loop
from tests.support.failing_device import num_pending
from tests.support.rows import cases
from tests.support.vision_families import FAMILIES
from vllm_mlx.cache.layers import leaves

NAMES = [*ARCHITECTURES, *PARTLY_ROTARY, *(f"vision:{family}" for family in FAMILIES)]
PROMPTS = ([5, 6, 7], [8] * 30)


def pending(driver: Driver) -> int:
    """Unevaluated operations behind every array of every cache."""
    return num_pending(array for batch in driver.engine.runner.batches for array in held(batch.leaves))


def held(caches: Any) -> Iterator[mx.array]:
    for leaf in leaves(caches):
        for value in vars(leaf).values():
            values = value if isinstance(value, list) else [value]
            yield from (array for array in values if isinstance(array, mx.array))


def decode(path: Path, num_tokens: tuple[int, int], num_rows: int = 2, num_draft_tokens: int = 0) -> list[int]:
    """The pending operations of rows in one batch after replies of so many tokens. Every third draft is wrong."""
    driver = Driver(path, num_draft_tokens=num_draft_tokens)
    for ids in PROMPTS[:num_rows]:
        reply = plain_loop(path, ids, num_tokens[1])[0] if num_draft_tokens else ()
        prediction = tuple(token if place % 3 else 499 for place, token in enumerate(reply))
        driver.add(ids, max_tokens=num_tokens[1] + 10, prediction=prediction)
    counts = []
    for num in num_tokens:
        while max(seq.num_output_tokens for seq in driver.seqs.values()) < num:
            driver.step()
        assert [len(batch.seqs) for batch in driver.engine.runner.batches] == [num_rows]
        counts.append(pending(driver))
    speculation = driver.engine.scheduler.speculation
    assert speculation is None or speculation.num_accepted["prediction"] < speculation.num_drafted["prediction"]
    return counts


@pytest.mark.parametrize("name", cases(NAMES, {"gemma3_text", "qwen3_5", "smollm3", "vision:gemma4"}))
def test_they_are_as_many_after_many_steps_as_after_few(checkpoint: Callable[..., Path], name: str) -> None:
    few, many = decode(checkpoint(name), (30, 60))
    assert few == many


@pytest.mark.parametrize("num_rows", cases([1, 2], [2]))
@pytest.mark.parametrize("name", cases(["qwen3", "gemma3_text", "gpt_oss", "vision:qwen3_5"], ["gemma3_text"]))
def test_rejected_drafts_leave_none_behind(checkpoint: Callable[..., Path], name: str, num_rows: int) -> None:
    few, many = decode(checkpoint(name), (30, 60), num_rows, num_draft_tokens=4)
    assert few == many


@pytest.mark.full
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_nor_do_they_grow_after_that(checkpoint: Callable[..., Path], name: str, num_rows: int) -> None:
    few, many = decode(checkpoint(name), (50, 600), num_rows)
    assert few == many
