"""What the first requests run has been run at load."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.checkpoints import ARCHITECTURES
from tests.support.engine_driver import GREEDY, Driver
from tests.support.guiding import Guiding
from tests.support.rows import USUAL, cases
from vllm_mlx.cache.layers import arrays
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.engine.lane import Source
from vllm_mlx.engine.loading import load_engines
from vllm_mlx.runner.calibrate import warm_up
from vllm_mlx.runner.checkpoint import find_checkpoint

HOT = TokenSampling(temperature=0.8, top_p=0.9, top_k=30, min_p=0.05, repetition_penalty=1.2, num_top_logprobs=2)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the operations that MLX is given."""
    found: set[str] = set()

    def noted(submits: Callable[..., None]) -> Callable[..., None]:
        def submit(*work: Any) -> None:
            graph = io.StringIO()
            mx.export_to_dot(graph, *arrays(list(work)))
            found.update(re.findall(r'label ="([^"]+)", shape=rectangle', graph.getvalue()))
            submits(*work)

        return submit

    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, noted(getattr(mx, name)))
    return found


@pytest.mark.parametrize("name", cases(ARCHITECTURES, {*USUAL, "gpt_oss"}))
def test_the_first_rows_run_nothing_that_was_not_run(
    checkpoint: Callable[..., Path], name: str, operations: set[str]
) -> None:
    path = checkpoint(name)
    driver, guiding = Driver(path, prefix_cache=False), Guiding(path)
    operations.clear()
    warm_up(driver.engine.runner.model)
    warmed = set(operations)
    operations.clear()
    for row, sampling in enumerate((GREEDY, HOT, GREEDY)):
        prompt = [row] * (9 + 5 * row)
        constraint = guiding.person(prompt, thinking="off") if row == 2 else None
        driver.add(prompt, 6, sampling, constraint=constraint)
    driver.run()
    driver.generate([[5] * 12, [6] * 15], max_tokens=4, sampling=TokenSampling(temperature=0.9, seed=1))
    assert all(reply.error is None for reply in driver.replies.values())
    assert {"ArgReduce", "Sort"} <= operations
    assert operations <= warmed


def test_nothing_of_it_stays(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("qwen3")
    config = EngineConfig(model=str(path), memory_budget_bytes=2 << 30)
    engine = load_engines([Source(name="m", config=config, checkpoint=find_checkpoint(str(path)))])
    before = mx.get_active_memory()
    warm_up(engine.runner.model)
    assert mx.get_active_memory() - before < 4096
    assert engine.num_rows == 0
