"""The log-probabilities of a prompt equal those of one plain forward pass, however the prompt is computed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as load_text_model
from mlx_vlm.utils import load_model as load_vision_model

from tests.support.checkpoints import ARCHITECTURES
from tests.support.engine_driver import GREEDY, Driver
from tests.support.rows import cases
from vllm_mlx.core.events import FinishReason, TokenLogprob

NAMES = (*ARCHITECTURES, "vision:qwen3_5", "vision:gemma3")
LENGTHS = (1, 2, 40, 300)
_random = random.Random(3)
PROMPTS = [[_random.randrange(500) for _ in range(length)] for length in LENGTHS]
TOP = 3
SCORED: dict[str, Any] = {"scores_prompt": True, "sampling": replace(GREEDY, num_top_logprobs=TOP)}


@pytest.fixture(scope="module", params=cases(NAMES, {"qwen3", "qwen3_5", "gemma3_text", "vision:qwen3_5"}))
def model(request, checkpoint):
    path = checkpoint(request.param)
    return path, [plain(path, request.param, prompt) for prompt in PROMPTS]


def plain(path: Path, name: str, prompt: list[int]) -> tuple[list[float], list[list[int]]]:
    """The log-probabilities of the tokens from the second one on, and the likeliest ids in their places."""
    if name.startswith("vision:"):
        logits = load_vision_model(path).language_model(mx.array([prompt])).logits
    else:
        logits = load_text_model(path)[0](mx.array([prompt]))
    logits = logits[0].astype(mx.float32)
    logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:-1]
    own = mx.take_along_axis(logprobs, mx.array(prompt[1:], dtype=mx.int32)[:, None], axis=-1)[:, 0]
    return own.tolist(), mx.argsort(-logprobs, axis=-1)[:, :TOP].tolist()


def check(found: Sequence[TokenLogprob], prompt: list[int], expected: tuple[list[float], list[list[int]]]) -> None:
    own, tops = expected
    assert [token.token_id for token in found] == prompt[1:]
    assert [token.logprob for token in found] == pytest.approx(own, abs=2e-4)
    alike = [[token_id for token_id, _ in token.top] == top for token, top in zip(found, tops, strict=True)]
    assert sum(alike) >= 0.99 * len(alike)  # near ties may change places
    assert all(len(token.top) == TOP for token in found)


def scored(driver: Driver, max_tokens: int = 1) -> list[int]:
    return [driver.add(prompt, max_tokens, **SCORED) for prompt in PROMPTS]


def check_all(driver: Driver, rows: list[int], expected: list[Any], max_tokens: int = 1) -> None:
    for row, prompt, own in zip(rows, PROMPTS, expected, strict=True):
        assert driver.replies[row].finish_reason is FinishReason.LENGTH
        assert len(driver.replies[row].token_ids) == max_tokens
        check(driver.seqs[row].prompt_logprobs, prompt, own)


def test_prompts_of_a_batch_beside_other_rows_and_with_a_stored_prefix(model):
    path, expected = model
    driver = Driver(path)
    beside = driver.add(PROMPTS[3][::-1], 30)
    while not driver.replies[beside].token_ids:
        driver.step()
    for max_tokens in (0, 4):
        rows = scored(driver, max_tokens)
        driver.run()
        check_all(driver, rows, expected, max_tokens)
        assert not any(driver.seqs[row].num_cached_tokens for row in rows)
    assert driver.replies[beside].token_ids == Driver(path).generate([PROMPTS[3][::-1]], max_tokens=30)[0]
    later = driver.add([*PROMPTS[3], 5], 1)  # what such a row computes is stored
    driver.run()
    assert driver.seqs[later].num_cached_tokens >= 290
    assert driver.engine.num_rows == 0


@pytest.mark.parametrize("chunk", [97, *(pytest.param(chunk, marks=pytest.mark.full) for chunk in (1, 16))])
def test_chunks_of_any_length(model, chunk):
    path, expected = model
    driver = Driver(path, max_prefill_chunk=chunk)
    rows = scored(driver)
    driver.run()
    check_all(driver, rows, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(
            pytest.param({name: name == "repeatable"}, marks=pytest.mark.full)
            for name in ("repeatable", "prefix_cache")
        ),
    ],
    ids=str,
)
def test_a_restart_loses_none_and_repeats_none(model, settings):
    path, expected = model
    for num_steps in (1, 2):
        driver = Driver(path, max_prefill_chunk=128, **settings)
        rows = scored(driver, max_tokens=2)
        for _ in range(num_steps):
            driver.step()
        driver.engine.recover(ValueError("a step failed"))
        driver.run()
        check_all(driver, rows, expected, max_tokens=2)
        assert driver.engine.scheduler.num_restarts


def test_rows_that_give_way_for_memory(checkpoint):
    path, prompts = checkpoint("qwen3"), [PROMPTS[3][start : start + 100 + start] for start in (0, 20, 40, 60)]
    driver = Driver(path, rows_bytes=3 * Driver(path).engine.default.facts.footprint.bytes_at(170))
    rows = [driver.add(prompt, 50, **SCORED) for prompt in prompts]
    driver.run()
    assert driver.engine.scheduler.num_preemptions
    for row, prompt in zip(rows, prompts, strict=True):
        check(driver.seqs[row].prompt_logprobs, prompt, plain(path, "qwen3", prompt))
        assert driver.replies[row].token_ids == Driver(path).generate([prompt], max_tokens=50)[0]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_of_one_prompt_share_what_one_has_computed(checkpoint, prefix_cache):
    path, shared = checkpoint("qwen3"), []
    driver = Driver(path, prefix_cache=prefix_cache)
    rows = [driver.add(PROMPTS[3], 2, prompt_logprobs=shared, **SCORED) for _ in range(3)]
    driver.run()
    check(shared, PROMPTS[3], plain(path, "qwen3", PROMPTS[3]))
    assert [driver.seqs[row].num_cached_tokens > 200 for row in rows] == [False, prefix_cache, prefix_cache]


def test_an_aborted_leader_leaves_its_choices_whole(checkpoint):
    path, shared = checkpoint("qwen3"), []
    driver = Driver(path, max_prefill_chunk=64)
    rows = [driver.add(PROMPTS[3], 2, prompt_logprobs=shared, **SCORED) for _ in range(2)]
    driver.step()
    driver.step()
    assert 0 < len(shared) < 299
    driver.engine.abort(rows[:1])
    driver.run()
    check(shared, PROMPTS[3], plain(path, "qwen3", PROMPTS[3]))


def test_a_prompt_alone_takes_no_decode_step(checkpoint):
    driver = Driver(checkpoint("qwen3"))
    row = driver.add(PROMPTS[2], 0, **SCORED)
    num = driver.engine.num_steps
    driver.run()
    assert driver.replies[row].finish_reason is FinishReason.LENGTH and driver.replies[row].token_ids == []
    assert driver.engine.num_steps - num <= 2  # its chunk, and one in which the row leaves
    row = driver.add([5], 0, stop_token_ids=frozenset(range(driver.engine.default.facts.info.vocab_size)), **SCORED)
    driver.run()
    assert driver.replies[row].finish_reason is FinishReason.LENGTH and driver.replies[row].token_ids == []
