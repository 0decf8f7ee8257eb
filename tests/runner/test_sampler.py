"""Each row of a batch is sampled by its own settings, the same alone and in company."""

import mlx.core as mx
import numpy as np
import pytest

from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.runner.sampler import Sampler, row_key

VOCAB = 64
LOGITS = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32) * 3


def sequence(prompt=(1, 2, 3), output=(), min_tokens=0, stops=(), **settings) -> Sequence:
    seq = Sequence(
        seq_id=0,
        prompt=PromptInputs(token_ids=tuple(prompt)),
        sampling=TokenSampling(**settings),
        max_tokens=100,
        min_tokens=min_tokens,
        stop_token_ids=frozenset(stops),
        output_token_ids=list(output),
    )
    seq.num_computed_tokens = seq.num_tokens  # the last known token is being fed
    return seq


def sample(seqs: list[Sequence], logits=None) -> list[int]:
    logits = mx.array(LOGITS[: len(seqs)] if logits is None else logits)
    fed = mx.array([seq.tokens(seq.num_tokens - 1, seq.num_tokens)[0] for seq in seqs])
    return Sampler(seqs, VOCAB).sample(logits, fed).tokens.tolist()


def draws(num_draws: int, row=0, **settings) -> list[int]:
    """Tokens drawn from one row of logits at successive positions of a reply."""
    tokens = []
    for position in range(num_draws):
        tokens += sample([sequence(output=[5] * position, **settings)], LOGITS[row : row + 1])
    return tokens


def softmax(scores: np.ndarray) -> np.ndarray:
    exp = np.exp(scores - scores.max())
    return exp / exp.sum()


def test_greedy_takes_the_most_likely():
    assert sample([sequence(temperature=0) for _ in range(8)]) == LOGITS.argmax(-1).tolist()
    assert sample([sequence(temperature=1, top_k=1)]) == [int(LOGITS[0].argmax())]


def test_a_row_is_sampled_alike_alone_and_in_a_crowd():
    settings = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.8},
        {"temperature": 1.3, "seed": 3, "top_k": 5},
        {"temperature": 1.0, "seed": 4, "min_p": 0.1},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3},
        {"temperature": 0, "logit_bias": {9: 100.0}},
    ]
    crowd = sample([sequence(output=[7, 7, 9], **setting) for setting in settings])
    alone = [
        sample([sequence(output=[7, 7, 9], **setting)], LOGITS[row : row + 1])[0]
        for row, setting in enumerate(settings)
    ]
    assert crowd == alone


def test_draws_follow_the_distribution():
    counts = np.bincount(draws(3000, temperature=1.0, seed=11), minlength=VOCAB) / 3000
    assert np.abs(counts - softmax(LOGITS[0])).max() < 0.03


def test_temperature_sharpens():
    expected = softmax(LOGITS[0] / 0.5)
    counts = np.bincount(draws(2000, temperature=0.5, seed=11), minlength=VOCAB) / 2000
    assert np.abs(counts - expected).max() < 0.04


@pytest.mark.parametrize("k", [2, 5])
def test_top_k_keeps_the_k_most_likely(k):
    allowed = set(np.argsort(-LOGITS[0])[:k].tolist())
    assert set(draws(300, temperature=2.0, seed=3, top_k=k)) == allowed


def test_top_p_keeps_the_smallest_set_with_that_mass():
    order = np.argsort(-LOGITS[0])
    mass = np.cumsum(softmax(LOGITS[0])[order])
    allowed = set(order[: int(np.searchsorted(mass, 0.6)) + 1].tolist())
    drawn = set(draws(400, temperature=1.0, seed=3, top_p=0.6))
    assert drawn == allowed


def test_min_p_keeps_tokens_within_a_share_of_the_best():
    probs = softmax(LOGITS[0])
    allowed = set(np.flatnonzero(probs >= 0.2 * probs.max()).tolist())
    assert set(draws(500, temperature=1.0, seed=3, min_p=0.2)) == allowed


def test_penalties_count_the_reply_and_repetition_also_the_prompt():
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 10], logits[0, 11], logits[0, 12] = 3.0, 2.9, 2.5
    assert sample([sequence(output=[10, 4], temperature=0, presence_penalty=1.0)], logits) == [11]
    assert sample([sequence(output=[10, 11, 11], temperature=0, frequency_penalty=0.3)], logits) == [10]
    assert sample([sequence(prompt=[10, 11, 1], output=[4], temperature=0, repetition_penalty=1.5)], logits) == [12]
    assert sample([sequence(prompt=[10, 11, 1], output=[4], temperature=0, presence_penalty=2.0)], logits) == [10]


def test_the_token_being_fed_is_penalised_once():
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 10], logits[0, 11] = 3.0, 2.0
    assert sample([sequence(output=[10], temperature=0, frequency_penalty=0.9)], logits) == [10]
    assert sample([sequence(output=[10], temperature=0, frequency_penalty=1.1)], logits) == [11]


def test_stop_ids_wait_for_min_tokens():
    best, second = np.argsort(-LOGITS[0])[:2].tolist()
    early = sequence(output=[4], temperature=0, min_tokens=3, stops=[best])
    late = sequence(output=[4, 4, 4], temperature=0, min_tokens=3, stops=[best])
    assert sample([early], LOGITS[:1]) == [second]
    assert sample([late], LOGITS[:1]) == [best]


def test_logprobs_are_of_the_models_own_distribution():
    seqs = [sequence(temperature=0, logit_bias={3: 100.0}, num_top_logprobs=4), sequence(temperature=0)]
    sampled = Sampler(seqs, VOCAB).sample(mx.array(LOGITS[:2]), mx.array([3, 3]))
    logprobs = np.log(softmax(LOGITS[0]))
    assert sampled.tokens.tolist()[0] == 3
    assert sampled.logprobs.tolist()[0] == pytest.approx(logprobs[3], abs=1e-5)
    assert sampled.top_ids.tolist()[0] == np.argsort(-logprobs)[:4].tolist()
    assert sampled.top_logprobs.tolist()[0] == pytest.approx(sorted(logprobs, reverse=True)[:4], abs=1e-5)


def test_keys_differ_by_seed_and_position():
    keys = {row_key(seed, position) for seed in range(-20, 20) for position in range(50)}
    assert len(keys) == 40 * 50


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-320, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 1e-50},  # 0 as a float32
        {"temperature": 1e-4, "top_k": 2**70},
    ],
)
def test_settings_at_the_edge_of_what_numbers_hold_still_take_the_most_likely(settings):
    assert sample([sequence(seed=3, **settings)]) == [int(LOGITS[0].argmax())]


def test_stop_ids_outside_the_vocabulary_hurt_nobody():
    assert sample([sequence(temperature=0, min_tokens=3, stops=[-30_000, -3, VOCAB, 10**12])]) == [
        int(LOGITS[0].argmax())
    ]
