"""The freed buffers that MLX keeps: how many, and how often they return to the system."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.engine_driver import Driver
from tests.support.rows import row
from vllm_mlx.runner.device import DeviceWatch, cache_limit_bytes

GB = 1 << 30
MB = 1 << 20


@pytest.fixture
def returns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that MLX kept at each return."""
    found: list[int] = []
    clears = mx.clear_cache

    def clear() -> None:
        found.append(mx.get_cache_memory())
        clears()

    monkeypatch.setattr(mx, "clear_cache", clear)
    return found


def free(num_bytes: int) -> None:
    array = mx.zeros(num_bytes, dtype=mx.uint8)
    mx.eval(array)


@row("S4-5")
def test_replies_alone_return_them_every_256_steps(checkpoint: Callable[..., Path], returns: list[int]) -> None:
    driver = Driver(checkpoint("qwen3"), num_draft_tokens=0)
    driver.add([5, 6, 7], max_tokens=600)
    while not driver.replies[0].token_ids:
        driver.step()
    returns.clear()
    driver.run()
    assert len(driver.replies[0].token_ids) == 600
    assert len(returns) == 2


@row("S4-5")
def test_each_step_that_reads_a_prompt_returns_them(checkpoint: Callable[..., Path], returns: list[int]) -> None:
    driver = Driver(checkpoint("qwen3"), max_prefill_chunk=64)
    seq_id = driver.add(list(range(5, 205)), max_tokens=4)
    num_steps = 0
    while not driver.replies[seq_id].token_ids:
        returns.clear()
        before = driver.seqs[seq_id].num_computed_tokens
        driver.step()
        if driver.seqs[seq_id].num_computed_tokens > before + 1:
            num_steps += 1
            assert len(returns) == 1 and mx.get_cache_memory() == 0
    assert num_steps >= 3


@row("S4-5")
def test_many_are_returned_at_the_next_look(returns: list[int]) -> None:
    watch = DeviceWatch(GB, cache_limit_bytes=64 * MB)
    mx.clear_cache()
    returns.clear()
    for _ in range(64):
        watch.return_buffers()
    assert not returns
    free(40 * MB)
    for _ in range(64):
        watch.return_buffers()
    assert [kept > 32 * MB for kept in returns] == [True], "and no second time"
    assert mx.get_cache_memory() < 32 * MB


@row("S4-5")
def test_mlx_keeps_as_many_as_a_chunk_takes() -> None:
    assert cache_limit_bytes(40 * GB) == 2 * GB
    assert cache_limit_bytes(4 * GB) == GB, "a small budget keeps fewer"
    assert cache_limit_bytes(40 * GB, transient_bytes=5 * GB) == 5 * GB


@row("S4-5")
def test_an_engine_sets_the_limit_that_it_watches(checkpoint: Callable[..., Path]) -> None:
    driver = Driver(checkpoint("qwen3"), memory_budget_bytes=4 * GB)
    expected = cache_limit_bytes(4 * GB, driver.engine.default.facts.memory.transient_bytes)
    assert mx.set_cache_limit(expected) == expected
