"""Which models Metal's kernels would compute wrong, by their config.json alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.checkpoints import ARCHITECTURES, model_config
from tests.support.vision_families import FAMILIES
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.engine.sizing import within_kernels
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model
from vllm_mlx.runner.model_types import kernel_fault, longest_chunk


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "nemotron_h", "ssm_state_size": 16}, "16 wide"),
        ({"model_type": "falcon_h1", "mamba_d_state": 48}, "48 wide"),
        ({"model_type": "mamba2", "state_size": 8}, "8 wide"),
        ({"model_type": "granitemoehybrid", "mamba_d_state": 16}, "multiples of 32"),
    ],
)
@pytest.mark.parametrize("by_mlx_vlm", [False, True])
def test_a_state_that_the_kernel_would_ignore(config: dict[str, Any], words: str, by_mlx_vlm: bool) -> None:
    fault = kernel_fault(config, by_mlx_vlm=by_mlx_vlm)
    assert fault is not None and words in fault and "Use another checkpoint" in fault


def test_a_head_that_only_mlx_vlms_kernel_takes_wrong() -> None:
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "linear_key_head_dim": 48}}
    assert "--text-only" in str(kernel_fault(config, by_mlx_vlm=True))
    assert "--text-only" not in str(kernel_fault(config, by_mlx_vlm=True, in_mlx_lm=False))
    assert kernel_fault(config, by_mlx_vlm=False) is None


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "nemotron_h", "ssm_state_size": 128},
        {"model_type": "mamba2", "state_size": 64},
        {"model_type": "jamba", "mamba_d_state": 16},  # Mamba 1: no kernel
        {"model_type": "qwen3_next", "linear_key_head_dim": 128},
        {"model_type": "llama"},
    ],
)
def test_real_models_pass(config: dict[str, Any]) -> None:
    assert kernel_fault(config, by_mlx_vlm=False) is None and kernel_fault(config, by_mlx_vlm=True) is None


def test_so_do_all_checkpoints_of_the_tests() -> None:
    assert not any(kernel_fault(model_config(name), by_mlx_vlm=False) for name in ARCHITECTURES)
    assert not any(kernel_fault(config, by_mlx_vlm=True) for config, _ in FAMILIES.values())


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"num_experts_per_tok": 8}, 4032),
        ({"text_config": {"num_experts_per_tok": 10}}, 3264),
        ({"top_k_experts": 8}, 4032),
        ({"num_experts_per_tok": 1}, 32704),
        ({"num_experts_per_tok": None}, None),
        ({}, None),
    ],
)
def test_a_chunk_of_a_mixture_of_experts_stays_within_the_kernels_numbers(
    config: dict[str, Any], tokens: int | None
) -> None:
    assert longest_chunk(config) == tokens


def test_on_metal_such_a_model_is_refused_and_long_chunks_are_lowered(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, moe = (
        find_checkpoint(str(path)) for path in (checkpoint("nemotron_h", ssm_state_size=16), checkpoint("qwen3_next"))
    )
    config = EngineConfig(model="m", max_prefill_chunk=20_000)
    assert within_kernels(config, moe) == config, "not on the CPU"
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with pytest.raises(ModelLoadError, match=r"cannot be served on Metal: .* 16 wide"):
        load_model(wrong, trust_remote_code=False)
    assert within_kernels(config, moe).max_prefill_chunk == 16_320
    assert "--max-prefill-chunk is lowered from 20000 to 16320" in caplog.text
