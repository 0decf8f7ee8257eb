"""Rows of one engine do not disturb each other: sampling, logprobs, aborts, faults, preemption, memory."""

import mlx.core as mx
import numpy as np
import pytest

from tests.support.checkpoints import OWN_STATE
from tests.support.engine_driver import Driver, RandomPrompts, plain_loop
from tests.support.integrity import check_integrity
from tests.support.rows import USUAL, cases, row
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.core.events import FinishReason
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.engine.lane import Source
from vllm_mlx.engine.loading import load_engines
from vllm_mlx.runner.checkpoint import find_checkpoint

prompt = RandomPrompts(2)


@pytest.fixture(scope="module", params=cases(["qwen3", "qwen3_5", "gemma3_text", "vision:qwen3_5"], ["qwen3_5"]))
def driver(request, checkpoint):
    return Driver(checkpoint(request.param))


HOT = TokenSampling(temperature=1.2, seed=77)


def test_logprobs_equal_those_of_a_plain_forward_pass(checkpoint):
    path = checkpoint("qwen3")
    ids = prompt(20)
    tokens, logits = plain_loop(path, ids, 8)
    driver = Driver(path)
    seq_id = driver.add(ids, 8, TokenSampling(temperature=0, num_top_logprobs=3))
    driver.add(prompt(50), 8)
    driver.run()
    reply = driver.replies[seq_id]
    assert reply.token_ids == tokens
    for logprob, own in zip(reply.logprobs, logits, strict=True):
        expected = np.array(own - mx.logsumexp(own))
        assert logprob.logprob == pytest.approx(expected[logprob.token_id], abs=1e-4)
        assert [token_id for token_id, _ in logprob.top] == np.argsort(-expected)[:3].tolist()
        assert [value for _, value in logprob.top] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-4)


def test_max_tokens_one_and_stop_ids_end_rows_exactly(driver):
    ids = prompt(12)
    tokens = driver.generate([ids], max_tokens=6)[0]
    assert driver.generate([ids], max_tokens=1)[0] == tokens[:1]
    seq_id = driver.add(ids, 6, stop_token_ids=frozenset([tokens[3]]))
    driver.run()
    reply = driver.replies[seq_id]
    assert reply.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert reply.finish_reason is FinishReason.STOP


def test_penalties_see_tokens_that_were_sampled_while_rows_came_and_went(checkpoint):
    """A penalised row's counts are rebuilt whenever its batch changes; the reply must not notice."""
    driver = Driver(checkpoint("qwen3"))
    ids = prompt(20)
    sampling = TokenSampling(temperature=0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2)
    alone = driver.generate([ids], max_tokens=30, sampling=sampling)[0]
    seq_id = driver.add(ids, 30, sampling)
    for length in range(3, 12):
        driver.step()
        driver.step()
        driver.add(prompt(length), max_tokens=length % 4 + 1)
    driver.run()
    assert driver.replies[seq_id].token_ids == alone
    assert alone != driver.generate([ids], max_tokens=30)[0]


@row("S4-13")
def test_an_aborted_row_leaves_nothing_and_nobody_notices(driver):
    keep_prompt, drop_prompt = prompt(40), prompt(2000)
    expected = driver.generate([keep_prompt], max_tokens=10)[0]
    keep = driver.add(keep_prompt, 10)
    drop = driver.add(drop_prompt, 10)
    driver.step()
    driver.engine.abort([drop])
    driver.run()
    assert driver.replies[keep].token_ids == expected
    assert driver.replies[drop].token_ids == []
    assert driver.engine.num_rows == 0


def test_a_row_whose_prefill_fails_ends_alone(driver, monkeypatch):
    good_prompt = prompt(40)
    expected = driver.generate([good_prompt], max_tokens=10)[0]
    model = type(driver.engine.runner.model)
    prefill = model.prefill

    def failing(self, seq, start, end, caches):
        if 777 in seq.tokens(start, end):
            raise RuntimeError("the device says no")
        prefill(self, seq, start, end, caches)

    monkeypatch.setattr(model, "prefill", failing)
    good = driver.add(good_prompt, 10)
    bad = driver.add([1, 777, 3], 10)
    driver.run()
    assert driver.replies[good].token_ids == expected
    assert driver.replies[bad].error is not None
    assert driver.generate([good_prompt], max_tokens=10)[0] == expected


@row("S1-9")
@pytest.mark.parametrize("name", cases([*USUAL, "gpt_oss", *OWN_STATE], ["nemotron_h"]))
def test_preempted_rows_continue_exactly(checkpoint, name):
    """They resume from whatever the cache kept of them."""
    path = checkpoint(name)
    prompts = [prompt(100 + 20 * row) for row in range(4)]
    free = Driver(path)
    expected = [free.generate([ids], max_tokens=50)[0] for ids in prompts]
    hot = free.generate([prompts[0]], max_tokens=50, sampling=HOT)[0]
    tight = Driver(path, rows_bytes=3 * free.engine.default.facts.footprint.bytes_at(170))
    seq_ids = [tight.add(ids, 50) for ids in prompts] + [tight.add(prompts[0], 50, HOT)]
    tight.run()
    assert sum(seq.num_preemptions for seq in tight.seqs.values()) > 0
    assert [tight.replies[seq_id].token_ids for seq_id in seq_ids] == [*expected, hot]
    check_integrity(tight.engine.cache_tree)


def test_a_long_row_beside_short_ones_pads_nothing(checkpoint):
    """8k tokens beside seven times 1k: batched naively, eight rows of 8k."""
    driver = Driver(checkpoint("qwen3", hidden_size=32, num_attention_heads=2, num_hidden_layers=1, head_dim=16))
    long = driver.add(prompt(8_000), max_tokens=100)
    for _ in range(7):
        driver.add(prompt(1_000), max_tokens=3_000)
    while driver.seqs[long].num_output_tokens < 10:
        driver.step()
    footprint = driver.engine.default.facts.footprint
    unpadded = sum(footprint.bytes_per_token * seq.num_computed_tokens for seq in driver.seqs.values())
    assert driver.engine.num_rows == 8
    assert driver.engine.runner.live_bytes() <= 1.3 * unpadded
    for seq_id in driver.seqs:
        driver.engine.abort([seq_id])
    driver.run()
    assert driver.engine.runner.live_bytes() == 0


def test_too_little_memory_is_refused_at_load(checkpoint):
    path = str(checkpoint("qwen3"))
    for settings, words in (
        ({"memory_budget_bytes": 1000}, "the weights of"),
        ({"memory_budget_bytes": 1_000_000}, "the weights of .* 2 Macs with as much memory hold it"),
        ({"memory_budget_bytes": 30_000_000, "max_model_len": 60_000, "max_prefill_chunk": 64}, "--max-model-len"),
    ):
        with pytest.raises(ConfigError, match=f"Too little memory.*{words}"):
            config = EngineConfig(model=str(path), **settings)
            load_engines([Source(name="m", config=config, checkpoint=find_checkpoint(path))])


@pytest.mark.parametrize("name", cases([*USUAL, *OWN_STATE], ["gemma3_text"]))
def test_live_rows_never_take_more_than_was_reckoned(checkpoint, name):
    driver = Driver(checkpoint(name), max_stall_ms=20_000)
    start = prompt(250)
    bookkeeping = 16 * 4 * 16  # two numbers a row and layer: lengths and paddings

    def run(lengths):
        for length in lengths:
            driver.add([*start, *prompt(length)], 20)
        while driver.engine.has_work:
            driver.step()
            assert driver.engine.runner.live_bytes() <= driver.engine.scheduler.room.rows_bytes() + bookkeeping

    run(range(0, 320, 40))  # joins at uneven lengths
    run([4] * 8)  # warm rows
    run([700] * 3)  # chunks longer than a window
