"""Weights are freed by counting references alone, because the server's collector never visits what it froze."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.rows import cases
from tests.support.unloading import serving
from tests.support.vision_checkpoints import write_vision_checkpoint
from vllm_mlx.core.request import SamplingParams
from vllm_mlx.llm import LLM
from vllm_mlx.runner.model import Model

PROMPT = [7 + (5 * place * place) % 180 for place in range(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@contextmanager
def frozen() -> Iterator[None]:
    """Nothing is collected inside the block, and what exists at its start never is."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(scope="module", params=cases(["qwen3", "qwen3_5", "vision"], ["vision"]))  # which has all three
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints with attention, with recurrent state, and with a vision encoder."""
    if request.param != "vision":
        return checkpoint(request.param)
    folder = tmp_path_factory.mktemp("vision")
    write_vision_checkpoint(folder, "qwen3_5")
    return folder


def test_a_closed_llm_has_freed_its_weights_although_the_disk_tier_knew_them(path: Path, tmp_path: Path) -> None:
    known = {id(found) for found in gc.get_objects() if isinstance(found, Model)}
    llm = LLM(str(path), max_model_len=2048, cache_dir=str(tmp_path), cache_disk_bytes=1 << 30)
    models = [found for found in gc.get_objects() if isinstance(found, Model) and id(found) not in known]
    modules = [weakref.ref(model.module) for model in models]
    del models
    with frozen():
        llm.generate([PROMPT], GREEDY)
        llm.close()
        assert modules and [module() for module in modules if module() is not None] == []


@pytest.mark.parametrize("num_times", [3, pytest.param(50, marks=pytest.mark.full)])
def test_each_unload_frees_the_weights_at_once(path: Path, tmp_path: Path, num_times: int) -> None:
    longer, first = list(PROMPT), 0
    with serving(path, tmp_path, cache_memory_bytes=1 << 20) as served, frozen():
        for number in range(num_times):
            served.ask(longer, GREEDY)
            module = served.loop.run_until_complete(
                served.client.ask(lambda engine: weakref.ref(engine.runner.model.module))
            )
            served.unload()
            assert module() is None
            status = served.status()
            held = mx.get_active_memory() - status["memory"]["cache_bytes"]
            first = first or held
            assert abs(held - first) <= 65536, number
            assert served.row()["missing_bytes"] == 0
            longer += [number + 1] * 20
