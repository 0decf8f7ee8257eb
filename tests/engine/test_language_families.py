"""Text of families that only mlx-vlm knows: the same replies, cached, computed, in a batch and in chunks."""

import importlib
import inspect
import os
import pkgutil

import mlx.core as mx
import mlx_vlm.models
import pytest

from tests.support.engine_driver import Driver, RandomPrompts, plain_loop
from tests.support.language_families import LANGUAGES, OTHER_NAMES, SILENT, WITH_IMAGES
from tests.support.rows import cases
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ConfigError, ModelLoadError
from vllm_mlx.engine.sizing import load_measured
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.libraries import knows
from vllm_mlx.runner.load_model import load_model

NUM_TOKENS = 6
GATE = ("k2_horizon", "cohere2_moe", "deepseek_v4")
WHOLE = ("deepseek_v4",)  # mlx-vlm computes another result if a prompt is cut
prompt = RandomPrompts(9)


def makes_text(package: str) -> bool:
    """Whether mlx-vlm's `Model` holds a language model, and mlx-lm has no module of this name."""
    model = getattr(importlib.import_module(f"mlx_vlm.models.{package}"), "Model", None)
    own = [base for base in getattr(model, "__mro__", ()) if base.__module__.startswith("mlx_vlm.models.")]
    return not knows({"model_type": package}) and any("language_model" in inspect.getsource(base) for base in own)


@pytest.mark.full  # it imports all packages
def test_each_package_that_makes_text_is_tried_here_or_has_images():
    packages = [found.name for found in pkgutil.iter_modules(mlx_vlm.models.__path__) if found.ispkg]
    assert {name for name in packages if makes_text(name)} == {*LANGUAGES, *SILENT, *WITH_IMAGES, *OTHER_NAMES}


@pytest.mark.parametrize("name", SILENT)
def test_a_model_that_does_not_write_token_by_token_is_refused_by_name(checkpoint, name):
    with pytest.raises(ModelLoadError, match=rf"family \({name}\) does not write a text token by token"):
        load_model(find_checkpoint(str(checkpoint(f"language:{name}"))), trust_remote_code=False)


def test_a_model_whose_chunks_differ_computes_prompts_whole_and_says_so(checkpoint):
    found = find_checkpoint(str(checkpoint("language:deepseek_v4")))
    model = load_measured(EngineConfig(model=str(found.path), memory_budget_bytes=1 << 30), found).model
    words = "mlx_vlm's deepseek_v4 computes something else if a prompt is cut"
    assert (model.no_chunks or "").startswith(words) and model.no_prefix_cache == model.no_drafts == model.no_chunks
    with pytest.raises(ConfigError, match=rf"--max-model-len 40000 is too long: {words} .* at most \d+ tokens at once"):
        Driver(found.path, max_model_len=40_000)


def test_such_a_prompt_is_whole_beside_replies_as_well(checkpoint):
    path, ids = checkpoint("language:deepseek_v4"), prompt(300)
    driver = Driver(path, max_model_len=1000, max_stall_ms=1)
    driver.add([1, 2, 3], 40)
    for _ in range(3):
        driver.step()
    seq_id = driver.add(ids, 2 * NUM_TOKENS)
    driver.run()
    assert driver.replies[seq_id].token_ids == plain_loop(path, ids, 2 * NUM_TOKENS)[0]


def test_hunyuan_v4_is_right_where_mlx_compiles(checkpoint):
    found = find_checkpoint(str(checkpoint("language:hy_v4")))
    mx.enable_compile()
    try:
        assert (
            load_measured(EngineConfig(model=str(found.path), memory_budget_bytes=1 << 30), found).model.no_chunks
            is None
        )
    finally:
        if "MLX_DISABLE_COMPILE" in os.environ:
            mx.disable_compile()


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
