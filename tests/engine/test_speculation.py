"""Replies with drafts equal those without: greedy and drawn, alone and batched, however many drafts are right."""

import random
from dataclasses import replace

import pytest

from tests.support.checkpoints import ARCHITECTURES, OWN_ATTENTION, OWN_STATE
from tests.support.engine_driver import GREEDY, Driver, RandomPrompts
from tests.support.rows import cases
from vllm_mlx.core.request import TokenSampling

from .vision_harness import VisionModel

NAMES = (*ARCHITECTURES, *OWN_STATE, *OWN_ATTENTION)
VISION = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "pixtral", "mistral3", "llava")
USUAL = ("gemma3_text",)  # the tests of MTP heads have vision:qwen3_5
LENGTHS = (40, 7, 61, 1, 300, 23, 33, 2)
NUM_TOKENS = 16
SETTINGS = (
    GREEDY,
    TokenSampling(temperature=1, seed=1),
    TokenSampling(temperature=0.8, top_p=0.9, top_k=40, seed=2),
    TokenSampling(temperature=0, presence_penalty=1.5, frequency_penalty=0.5),
    TokenSampling(temperature=1, repetition_penalty=1.5, seed=3),
    TokenSampling(temperature=0.7, logit_bias={7: 4.0, 9: -100.0}, seed=4),
    TokenSampling(temperature=1, num_top_logprobs=3, seed=5),
    TokenSampling(temperature=0, num_top_logprobs=0),
)
PROMPTS = [RandomPrompts(5 + length)(length) for length in LENGTHS]


@pytest.fixture(scope="module", params=cases((*NAMES, *(f"vision:{name}" for name in VISION)), USUAL))
def path(request, checkpoint):
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def plain(path):
    """Each row alone, without drafts: the driver's replies."""
    driver = Driver(path, num_draft_tokens=0, prefix_cache=False)
    return [generate(driver, [index])[0] for index in range(len(PROMPTS))]


def generate(driver, indices, predictions=None, **fields):
    """The replies to these prompts, which run together, each with its own settings."""
    ids = [
        driver.add(
            PROMPTS[index],
            NUM_TOKENS,
            SETTINGS[index],
            prediction=tuple(predictions[index]) if predictions else (),
            **fields,
        )
        for index in indices
    ]
    driver.run()
    assert [driver.replies[seq_id].error for seq_id in ids] == [None] * len(ids)
    return [driver.replies[seq_id] for seq_id in ids]


def guessed(replies, right, seed=3):
    """Predictions of which so many tokens are right."""
    rng = random.Random(seed)
    return [[token if rng.random() < right else (token + 1) % 500 for token in reply.token_ids] for reply in replies]


def logprobs(reply):
    return [
        None if found is None else (found.token_id, pytest.approx(found.logprob, abs=1e-3)) for found in reply.logprobs
    ]


@pytest.mark.parametrize("right", [0.7, *(pytest.param(share, marks=pytest.mark.full) for share in (0.0, 1.0))])
@pytest.mark.parametrize("num_rows", [1, 8, pytest.param(3, marks=pytest.mark.full)])
def test_replies_with_drafts_equal_those_without(path, plain, right, num_rows):
    driver = Driver(path, num_draft_tokens=4, prefix_cache=False)
    predictions = guessed(plain, right)
    for first in range(0, len(PROMPTS), num_rows):
        indices = range(first, min(first + num_rows, len(PROMPTS)))
        replies = generate(driver, indices, predictions)
        assert [reply.token_ids for reply in replies] == [plain[index].token_ids for index in indices]
        assert [logprobs(reply) for reply in replies] == [logprobs(plain[index]) for index in indices]
    speculation = driver.engine.scheduler.speculation
    can_share = driver.engine.default.facts.no_shared_forward is None
    if speculation is not None and right and (can_share or num_rows == 1):
        assert speculation.num_accepted["prediction"] > 0
    assert driver.engine.num_rows == driver.engine.scheduler.num_restarts == 0


def test_a_reply_ends_at_once_while_another_begins_with_drafts(checkpoint):
    path = checkpoint("qwen3")
    [reply] = Driver(path, num_draft_tokens=0).generate([[5]], max_tokens=80)
    driver = Driver(path, num_draft_tokens=4)
    first = driver.add(PROMPTS[0], 6)
    while len(driver.replies[first].token_ids) < 4:
        driver.step()
    second = driver.add([5], 80, prediction=tuple(reply))  # it needs no prefill
    while driver.replies[first].finish_reason is None:
        driver.step()
    assert len(driver.replies[second].token_ids) < 20
    driver.run()
    assert driver.replies[second].token_ids == reply


def test_an_id_without_a_logit_is_no_draft(checkpoint):
    path = checkpoint("qwen3")
    [reply] = Driver(path, num_draft_tokens=0).generate([[5]], max_tokens=20)
    driver = Driver(path, num_draft_tokens=4)
    seq_id = driver.add([5], 20, prediction=(*reply[:3], 10**6, *reply[4:]))
    driver.run()
    assert driver.replies[seq_id].token_ids == reply


@pytest.mark.parametrize("family", cases(["qwen2_5_vl", "gemma3", "qwen3_5"], ["qwen3_5"]))
def test_replies_about_images_are_the_same_with_drafts(checkpoint, family):
    model = VisionModel(checkpoint(f"vision:{family}"))
    asked = [([f"{number}: What is in this image? ", number],) for number in range(4)]
    plain = [model.reply(*turns, max_tokens=12) for turns in asked]
    driver = model.driver(num_draft_tokens=3)
    ids = [
        driver.add(model.prompt(*turns), 12, prediction=tuple(reply)) for turns, reply in zip(asked, plain, strict=True)
    ]
    driver.run()
    assert [driver.replies[seq_id].token_ids for seq_id in ids] == plain
    assert driver.engine.scheduler.speculation.num_accepted["prediction"] > 0


REPEATS = TokenSampling(
    temperature=0,
    presence_penalty=0.7,
    frequency_penalty=0.9,
    repetition_penalty=1.1,
    logit_bias=dict.fromkeys(range(20, 26), 40.0),
)


@pytest.mark.parametrize("temperature", [0, 1])
def test_penalties_count_the_tokens_of_the_same_run_of_drafts(checkpoint, temperature):
    """The reply has few tokens to choose from, so each of them is penalised again and again within one run."""
    path = checkpoint("qwen3")
    sampling = replace(REPEATS, temperature=temperature, seed=3)
    [reply] = Driver(path, num_draft_tokens=0).generate([PROMPTS[0]], max_tokens=60, sampling=sampling)
    assert set(reply) <= set(REPEATS.logit_bias) and len(set(reply)) > 3
    driver = Driver(path, num_draft_tokens=7)
    seq_id = driver.add(PROMPTS[0], 60, sampling, prediction=tuple(reply))
    driver.run()
    assert driver.replies[seq_id].token_ids == reply
    speculation = driver.engine.scheduler.speculation
    assert speculation.num_accepted["prediction"] == speculation.num_drafted["prediction"] > 30


@pytest.mark.parametrize("name", cases(["qwen3_5", "qwen3", "gemma3_text", "nemotron_h"], ["qwen3_5"]))
def test_a_stop_id_inside_right_drafts_ends_the_reply_and_its_state(checkpoint, name):
    """A later turn of a hybrid model would resume from a state that has taken in more than the reply."""
    path, prompt = checkpoint(name), RandomPrompts(9)
    plain = Driver(path, num_draft_tokens=0, prefix_cache=False)
    driver = Driver(path, num_draft_tokens=7)
    num_cached = 0
    for _ in range(3):
        asked, more = prompt(30), prompt(5)
        [free] = plain.generate([asked], max_tokens=30)
        at = next(place for place in range(9, 30) if free[place] not in free[:place])
        seq_id = driver.add(asked, 30, prediction=tuple(free), stop_token_ids=frozenset({free[at]}))
        driver.run()
        said = driver.replies[seq_id].token_ids
        assert said == free[: at + 1]
        later = [*asked, *said, *more]
        seq_id = driver.add(later, 12)
        driver.run()
        assert driver.replies[seq_id].token_ids == plain.generate([later], max_tokens=12)[0]
        num_cached += driver.seqs[seq_id].num_cached_tokens
    assert num_cached > 0 and driver.engine.scheduler.speculation.num_accepted["prediction"] > 0
