"""Rows whose calls are held to declared names: drawn as if each mask had been known in time, and free elsewhere."""

import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.support.engine_driver import GREEDY, RandomPrompts, plain_loop
from tests.support.guiding import Guiding
from tests.support.rows import cases
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import Constraint, PromptInputs, Sequence
from vllm_mlx.runner.row_constraint import RowConstraint

NAMES = ("read", "read_all", "write")
prompt = RandomPrompts(11)


@pytest.fixture(scope="module", params=cases(["qwen3", "qwen3_5"], ["qwen3_5"]))
def path(request, checkpoint):
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def guiding(path):
    return Guiding(path, tools="glm45")


@pytest.fixture(scope="module")
def calling(guiding) -> TokenSampling:
    """Every token begins a call, unless a mask forbids it, and no reasoning begins. The name comes at once."""
    tokenizer = guiding.tokenizer
    texts = {token_id: tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)}
    bias = {token_id: -90.0 for token_id, text in texts.items() if text.strip()[:1] in "<{"}
    bias[tokenizer.token_id("<tool_call>")] = 90.0
    return replace(GREEDY, logit_bias=bias)


def held_loop(path, ids: list[int], constraint: Constraint, sampling: TokenSampling, max_tokens: int) -> list[int]:
    """Greedy tokens of one row, each drawn with the mask of all tokens before it, without any code of the runner."""
    model = load_model(path)[0]
    caches = make_prompt_cache(model)
    seq = Sequence(seq_id=0, prompt=PromptInputs(token_ids=tuple(ids)), sampling=sampling, max_tokens=max_tokens)
    held, tokens = RowConstraint(constraint, seq), []
    logits = model(mx.array([ids]), cache=caches)[0, -1]
    for _ in range(max_tokens):
        scores = np.array(logits.astype(mx.float32))
        for token_id, value in sampling.logit_bias.items():
            scores[token_id] += value
        if held.is_bounding:
            mask = np.empty(held.num_words, dtype=np.uint32)
            held.fill(mask)
            scores[np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(scores)] == 0] = -np.inf
        tokens.append(int(scores.argmax()))
        held.feed(tokens[-1])
        logits = model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
    return tokens


def called(text: str) -> list[str]:
    """The names in a reply that consists of cut-off calls."""
    return [re.match(r"\s*(\w*)", call)[1] for call in text.split("<tool_call>")[1:-1]]


def test_a_token_that_was_drawn_too_early_is_drawn_again(path, driver, guiding, calling) -> None:
    ids = prompt(9)
    constraint = guiding.names(ids, *NAMES)
    expected = held_loop(path, ids, constraint, calling, 60)
    row = driver.add(ids, 60, calling, constraint=constraint)
    free = {driver.add(each, 40): each for each in (prompt(5), prompt(14))}
    driver.run()
    assert driver.replies[row].token_ids == expected
    names = called(guiding.text(expected))
    assert names and set(names) <= set(NAMES)
    for seq_id, each in free.items():
        assert driver.replies[seq_id].token_ids == plain_loop(path, each, 40)[0]


def test_a_reply_with_penalties_is_the_same_alone_and_in_a_crowd(driver, guiding, calling) -> None:
    """A second draw of a token counts no token twice."""
    ids = prompt(7)
    sampling = replace(calling, temperature=1.2, seed=4, repetition_penalty=1.2, frequency_penalty=0.7)
    fields = {"sampling": sampling, "constraint": guiding.names(ids, *NAMES)}
    alone = driver.generate([ids], max_tokens=60, **fields)[0]
    row = driver.add(ids, 60, **fields)
    crowd = [driver.add(each := prompt(6), 60, calling, constraint=guiding.names(each, "other")) for _ in range(2)]
    driver.run()
    assert driver.replies[row].token_ids == alone
    assert set(called(guiding.text(alone))) <= set(NAMES)
    for other in crowd:
        assert set(called(guiding.text(driver.replies[other].token_ids))) == {"other"}
