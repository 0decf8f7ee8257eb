"""A grammar or a budget that waits for the end of reasoning adds little work to each token. The tests count calls."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.engine_driver import GREEDY, Driver, RandomPrompts, Reply
from tests.support.guiding import Guiding
from tests.support.rows import row
from vllm_mlx.core.sequence import Constraint

prompt = RandomPrompts(3)
SKIPPED, NUM_TOKENS = 80, 32  # tokens that are decoded first, so that work which grows with the reply is seen


class Calls:
    """Counts calls of Python functions and of functions of libraries, MLX's among them, in this thread."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "Calls":
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.number += event in ("call", "c_call")


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


def decoded(path: Path, ids: list[int], banned: Iterable[int], constraint: Constraint | None) -> tuple[Reply, int, int]:
    """Return a reply, the steps of its last tokens, and the calls in these steps."""
    driver = Driver(path)
    sampling = dataclasses.replace(GREEDY, logit_bias=dict.fromkeys(banned, -100.0))
    seq_id = driver.add(ids, SKIPPED + NUM_TOKENS, sampling, constraint=constraint)
    reply = driver.replies[seq_id]
    while len(reply.token_ids) < SKIPPED:
        driver.step()
    before = driver.engine.report().num_steps
    with Calls() as calls:
        driver.run()
    return reply, driver.engine.report().num_steps - before, calls.number


@row("S2-13", "S3-17")
def test_a_reply_that_reasons_decodes_like_one_without_grammar_and_budget(path: Path) -> None:
    """The same tokens in as many steps. A step of this small model takes some 600 calls, that of a real one 5,000."""
    guiding = Guiding(path)
    start, end = (guiding.tokenizer.token_id(tag) for tag in ("<think>", "</think>"))
    ids, banned = [*prompt(8), start], (start, end, *guiding.tokenizer.eos_token_ids)
    plain, num_steps, num_calls = decoded(path, ids, banned, None)
    for constraint, allowance in (
        (guiding.constraint(ids, thinking_token_budget=10_000), 50),
        (guiding.person(ids), 100),
        (guiding.person(ids, thinking_token_budget=10_000), 100),
    ):
        assert constraint is not None
        reply, steps, calls = decoded(path, ids, banned, constraint)
        assert reply.token_ids == plain.token_ids and len(plain.token_ids) == SKIPPED + NUM_TOKENS
        assert steps == num_steps
        assert calls - num_calls <= allowance * NUM_TOKENS
