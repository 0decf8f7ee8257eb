"""The number of device buffers that stored state takes: few for each thousand tokens, whatever the architecture."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import ARCHITECTURES
from tests.support.engine_driver import Driver
from tests.support.rows import cases

SHARED = [(7 * i) % 500 for i in range(1500)]
BUFFERS_OF_A_STATE = 2  # convolutions and recurrences


@pytest.mark.parametrize("name", cases(ARCHITECTURES, ["qwen3_5"]))
def test_a_thousand_stored_tokens_take_at_most_four_buffers(checkpoint: Callable[..., Path], name: str) -> None:
    few_heads = checkpoint(name, num_attention_heads=2, num_key_value_heads=1)  # they cost time, and are in one buffer
    driver = Driver(few_heads, max_prefill_chunk=2048)
    for branch in range(3):
        driver.generate([[*SHARED, *((branch + 3) * i % 500 for i in range(900))]], max_tokens=2)
    cache = driver.engine.report().cache
    assert cache is not None
    num_tokens = sum(entry.end - entry.start for entry in driver.engine.cache_entries())
    assert num_tokens > 4000
    assert 0 < cache.used_buffers - BUFFERS_OF_A_STATE * cache.num_states <= 4 * num_tokens / 1000
