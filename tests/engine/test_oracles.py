"""Greedy replies of the engine equal a plain loop over the model, however rows arrive, share batches or are cut."""

import random

import mlx.core as mx
import pytest

from tests.support.checkpoints import ARCHITECTURES, OWN_ATTENTION, OWN_STATE
from tests.support.engine_driver import Driver, ExpectedTokens, plain_loop
from tests.support.rows import cases

NAMES = (*ARCHITECTURES, *OWN_STATE, *OWN_ATTENTION, "vision:qwen3_5")
ALIKE = ("qwen3_next", "jamba", "falcon_h1", "granitemoehybrid")  # hybrids that resemble others
NUM_TOKENS = 6
_random = random.Random(1)
PROMPTS = [[_random.randrange(500) for _ in range(length)] for length in (1, 5, 40, 70, 300)]


@pytest.fixture(scope="module", params=cases(NAMES, {*NAMES} - {*ALIKE}))
def model(request, checkpoint):
    path = checkpoint(request.param)
    return path, [plain_loop(path, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]


def test_single_batched_staggered_and_chunked_rows_all_give_the_plain_loops_tokens(model):
    path, expected = model
    driver = Driver(path)
    assert [driver.generate([prompt], max_tokens=NUM_TOKENS)[0] for prompt in PROMPTS] == expected
    assert driver.generate(PROMPTS, max_tokens=NUM_TOKENS) == expected
    assert staggered(driver) == expected
    assert driver.engine.num_rows == 0


@pytest.mark.parametrize("model", cases(NAMES, {"qwen3_5", "llama4"}), indirect=True, scope="module")
@pytest.mark.parametrize("chunk", [7, *(pytest.param(chunk, marks=pytest.mark.full) for chunk in (1, 16, 512))])
def test_any_chunk_length_gives_the_plain_loops_tokens(model, chunk):
    path, expected = model
    num = len(PROMPTS) if chunk > 7 else -1  # the longest one takes long in short chunks
    replies = Driver(path, max_prefill_chunk=chunk).generate(PROMPTS[:num], max_tokens=NUM_TOKENS)
    assert replies == expected[:num]


def test_a_reply_may_differ_after_a_near_tie_only():
    expected = ExpectedTokens(
        [2, 0, 1], [mx.array([0.0, 1.0, 5.0]), mx.array([3.0, 1.0, 2.9999]), mx.array([0.0, 4.0, 1.0])]
    )
    for reply in ([2, 0, 1], [2, 2, 7]):
        assert reply == expected and expected == reply and [reply] == [expected]
    for reply in ([2, 1, 1], [1, 0, 1], [2, 0], [2, 0, 0]):
        assert reply != expected and expected != reply and [reply] != [expected]


def staggered(driver: Driver) -> list[list[int]]:
    """Every prompt arrives two steps after the one before it, while that one decodes."""
    seq_ids = []
    for prompt in PROMPTS:
        seq_ids.append(driver.add(prompt, max_tokens=NUM_TOKENS))
        driver.step()
        driver.step()
    driver.run()
    return [driver.replies[seq_id].token_ids for seq_id in seq_ids]
