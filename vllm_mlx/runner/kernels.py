"""What MLX's Metal kernels compute wrong without an error, found in config.json before the load. Pure: asks no device.

The CPU backend computes all of it right. Sources: mlx_lm/models/ssm.py, mlx_vlm/models/qwen3_5/gated_delta.py and, in
MLX, backend/metal/kernels/quantized_nax.h.
"""

from collections.abc import Mapping
from typing import Any

from ..core.errors import setting

_SIMD = 32  # threads among which a kernel divides the state of a head, without a remainder
_SSM_FAMILIES = frozenset({"falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "plamo2", "plamo2vl"})
_SSM_WIDTHS = ("mamba_d_state", "ssm_state_size", "state_size")
_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")
_MOST_ROWS = 32_767  # rows of a product of experts whose bounds fit the kernel's 16-bit numbers
_TILE = 64  # rows


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model."""
    return config.get("text_config") or config


def kernel_fault(config: Mapping[str, Any], *, by_mlx_vlm: bool) -> str | None:
    """Why Metal's kernels compute this model wrong, and what to do. None: they compute it right."""
    text = text_config(config)
    if str(text.get("model_type")).removesuffix("_text") in _SSM_FAMILIES:
        width = next((text[key] for key in _SSM_WIDTHS if isinstance(text.get(key), int)), _SIMD)
        if width % _SIMD:
            return (
                f"the state of its recurrent layers is {width} wide. MLX's kernel takes multiples of {_SIMD} and would "
                "ignore other states. Use another checkpoint."
            )
    width = text.get("linear_key_head_dim")
    if by_mlx_vlm and isinstance(width, int) and width % _SIMD:
        return (
            f"the heads of its linear attention are {width} wide. mlx-vlm's kernel takes multiples of {_SIMD} and "
            f"would ignore a part of the state. Serve it with {setting('text_only')}: mlx-lm uses no kernel then."
        )
    return None


def longest_chunk(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest prefill chunk that the kernel for a mixture of experts computes right on an M5.

    Its rows are the chunk's tokens, once for each expert of a token. None: the model has no experts.
    """
    text = text_config(config)
    experts = next((text[key] for key in _EXPERTS if isinstance(text.get(key), int) and text[key] > 0), None)
    return None if experts is None else _MOST_ROWS // experts // _TILE * _TILE
