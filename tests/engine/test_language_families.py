"""Text of families that only mlx-vlm knows: the same replies cached, computed, in a batch and in chunks, or in words."""

import mlx.core as mx
import pytest

from tests.support.engine_driver import Driver, RandomPrompts, plain_loop
from tests.support.language_families import LANGUAGES
from tests.support.rows import cases

NUM_TOKENS = 6
GATE = ("k2_horizon", "cohere2_moe", "deepseek_v4")
WHOLE = ("deepseek_v4",)  # mlx-vlm computes another result if a prompt is cut
prompt = RandomPrompts(9)


@pytest.fixture(scope="module", params=cases(LANGUAGES, GATE))
def family(request, checkpoint):
    return request.param, checkpoint(f"language:{request.param}")


def test_cached_batched_and_chunked_replies_equal_the_plain_loops(family):
    name, path = family
    prompts = [prompt(length) for length in (1, 40, 70, 130)]
    expected = [plain_loop(path, ids, NUM_TOKENS)[0] for ids in prompts]
    whole = Driver(path, max_model_len=1000)
    assert [whole.generate([ids], max_tokens=NUM_TOKENS)[0] for ids in prompts] == expected
    assert whole.generate(prompts, max_tokens=NUM_TOKENS) == expected
    assert Driver(path, max_model_len=1000, max_prefill_chunk=7).generate(prompts, max_tokens=NUM_TOKENS) == expected
    ids = [*prompts[-1], *prompt(9)]
    seq_id = whole.add(ids, NUM_TOKENS)
    whole.run()
    assert whole.replies[seq_id].token_ids == plain_loop(path, ids, NUM_TOKENS)[0]
    assert (whole.seqs[seq_id].num_cached_tokens >= 100) == (name not in WHOLE)
