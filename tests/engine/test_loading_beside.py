"""Weights come between the steps of another model: one slice at a time, none too large, and replies go on."""

import asyncio
import logging
from itertools import pairwise
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import EngineConfig, ModelConfig
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import begin_loading
from vllm_mlx.runner.loading import SLICE_BYTES
from vllm_mlx.runner.model import Model

from .test_several_models import Serving, prompt_of

LARGE = {"hidden_size": 320, "intermediate_size": 320, "num_local_experts": 80}


NUM_ROWS = 4


class Slices:
    """Notes at each part of a load how many steps there were. The load goes on only while all rows decode beside it."""

    def __init__(self, engine: LLMEngine, path: str, slice_bytes: int):
        self._loading = begin_loading(find_checkpoint(path), trust_remote_code=False, slice_bytes=slice_bytes)
        self._engine = engine
        self.seen: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loading, name)

    def advance(self) -> Model | None:
        if self._engine.scheduler.num_running < NUM_ROWS:
            assert not self.seen, "a reply ended before the load"
            return None
        self.seen.append(self._engine.num_steps)
        return self._loading.advance()


def check(options: dict[str, Any], slice_bytes: int, num_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    paths = (str(checkpoint("qwen3")), str(checkpoint("gpt_oss", **options)))
    models = Catalogue(tuple(Entry(config=ModelConfig(model=each, max_model_len=4096), name=each) for each in paths))
    config, made = EngineConfig(model=paths[0], memory_budget_bytes=4 << 30), list[Slices]()

    def watch(engine: LLMEngine) -> int:
        def begin() -> Any:
            made.append(Slices(engine, paths[1], slice_bytes))
            return made[0]

        assembly = engine.models[1].assembly
        assembly.begin = begin  # type: ignore[method-assign]
        return assembly.room_bytes

    async def run(served: Serving) -> tuple[int, str]:
        prompts = [prompt_of(number, 40) for number in range(NUM_ROWS)]
        alone = await asyncio.gather(*(served.ask(0, prompt, num_tokens) for prompt in prompts))
        await served.client.unload_model(1, wait=True)
        largest_bytes = await served.client.ask(watch)
        await served.client.load_model(1, wait=False)
        asked = [asyncio.create_task(served.ask(0, prompt, num_tokens)) for prompt in prompts]
        await served.client.load_model(1, wait=True)
        assert [reply for reply, _ in await asyncio.gather(*asked)] == [reply for reply, _ in alone]
        metrics = {metric.name: metric for metric in await served.client.metrics()}
        return largest_bytes, str(metrics["vllm_mlx_model_build_seconds"])

    caplog.set_level(logging.INFO, logger="vllm_mlx.engine.engine")
    with asyncio.Runner() as runner:
        served = Serving(start_engine(config, None, models))
        try:
            largest_bytes, metric = runner.run(run(served))
        finally:
            runner.run(served.client.shutdown(0))
    [slices] = made
    assert len(slices.seen) > 8 and all(after > before for before, after in pairwise(slices.seen))
    assert slices.most_bytes <= max(slice_bytes, largest_bytes)
    assert "to build it took" in caplog.text and "gpt_oss" in metric


def test_a_step_lies_between_two_slices(caplog: pytest.LogCaptureFixture) -> None:
    check({}, 40_000, 100, caplog)


@pytest.mark.full
def test_so_it_is_with_400_mb(caplog: pytest.LogCaptureFixture) -> None:
    check(LARGE, SLICE_BYTES, 400, caplog)
