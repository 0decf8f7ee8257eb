"""A device with less memory than the budget says: what is measured there is heeded, and nobody's reply changes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.engine_driver import Driver
from tests.support.rows import cases
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.memory import Pressure, SystemMemory
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.runner.device import DeviceMemory

from .test_client import collect, request

PROMPTS = [[(13 * row + 5 * place) % 500 for place in range(600)] for row in range(4)]
GB = 1 << 30


@pytest.mark.parametrize("name", cases(["qwen3", "nemotron_h"], ["qwen3"]))
def test_chunks_and_cache_and_rows_give_way(checkpoint: Callable[..., Path], name: str) -> None:
    path = checkpoint(name)
    free = Driver(path)
    expected = [free.generate([ids], max_tokens=40)[0] for ids in PROMPTS]
    tight = Driver(path)
    row_bytes = tight.engine.default.facts.footprint.bytes_at(640)
    assert tight.generate([PROMPTS[0]], max_tokens=40) == [expected[0]]
    tight.engine.watch.limit_bytes = mx.get_active_memory() + 2 * row_bytes
    seq_ids = [tight.add(ids, 40) for ids in PROMPTS]
    tight.run()
    assert [tight.replies[seq_id].token_ids for seq_id in seq_ids] == expected
    report = tight.engine.report()
    assert report.lanes[0].num_shortened
    assert report.cache is not None and report.cache.evictions
    assert report.device.active_bytes <= report.device.limit_bytes
    assert report.device.peak_bytes > report.device.limit_bytes, "it was measured, not foreseen"


@pytest.mark.parametrize(
    ("device", "budget_gb", "limit_gb"),
    [
        (DeviceMemory(64 * GB, 48 * GB), 40, 45.6),
        (DeviceMemory(64 * GB, 48 * GB), 47, 47),  # more was asked for
        (DeviceMemory(64 * GB, None), 40, 54.4),
    ],
)
def test_the_limit_lies_short_of_the_danger_zone(device: DeviceMemory, budget_gb: int, limit_gb: float) -> None:
    assert device.limit_bytes(budget_gb * GB) == pytest.approx(limit_gb * GB)
    assert device.default_budget_bytes < device.limit_bytes(device.default_budget_bytes)


def test_an_idle_engine_gives_memory_back_under_pressure(checkpoint: Callable[..., Path]) -> None:
    driver = Driver(checkpoint("qwen3"))
    driver.generate([PROMPTS[0]], max_tokens=4)
    tree = driver.engine.cache_tree
    assert tree is not None
    for rise in range(2):
        driver.engine.watch.system = lambda: SystemMemory(pressure=Pressure.CRITICAL)
        before = tree.used_bytes
        driver.engine.yield_memory()
        assert tree.used_bytes <= before // 2, f"rise {rise}"
        num_steps = driver.engine.num_steps
        driver.engine.yield_memory()
        assert driver.engine.num_steps == num_steps, "only a change counts"
        driver.engine.watch.system = lambda: SystemMemory(pressure=Pressure.NORMAL)
        driver.engine.yield_memory()


def test_the_thread_looks_at_the_memory_while_nobody_asks(checkpoint: Callable[..., Path]) -> None:
    pressure = Pressure.NORMAL

    async def run(client: EngineClient) -> None:
        nonlocal pressure
        await collect(client, request("Some words that are kept"))
        engine = await client.ask(lambda engine: engine)
        engine.watch.system = lambda: SystemMemory(pressure=pressure)
        tree = engine.cache_tree
        assert tree is not None
        before = await client.ask(lambda _: tree.used_bytes)
        pressure = Pressure.CRITICAL
        async with asyncio.timeout(30):
            while tree.used_bytes > before // 2:
                await asyncio.sleep(0.05)
        await client.shutdown(0)

    client = start_engine(EngineConfig(model=str(checkpoint("qwen3")), memory_budget_bytes=2 << 30))
    asyncio.run(run(client))
