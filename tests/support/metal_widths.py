"""Checkpoints with the widths of real models, on which the Metal kernels run that real models run on.

The tiny checkpoints run everywhere, but on a Mac they run on slow general code. The kernels ask for heads of 64, 96,
128 or 256, for states of Mamba2 and keys of gated delta in multiples of 32 (unchecked: other widths compute nonsense),
128 for the packed kernel of gated delta, and for inputs of quantised products in multiples of 512.
"""

from typing import Any

from .checkpoints import CONFIGS
from .vision_families import FAMILIES

_COMMON: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
_HEADS_OF_64: dict[str, Any] = {**_COMMON, "num_attention_heads": 8, "num_key_value_heads": 2}
_HEADS_OF_128: dict[str, Any] = {**_COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
_HEADS_OF_256: dict[str, Any] = {**_COMMON, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
_DELTA: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 2}
_MAMBA: dict[str, Any] = {"mamba_d_state": 128, "mamba_d_head": 64}

# Architecture → changes of the tiny checkpoint's config.json.
WIDE: dict[str, dict[str, Any]] = {
    "llama": _HEADS_OF_64, "qwen3": _HEADS_OF_128,
    "qwen3_next": {**_HEADS_OF_256, **_DELTA, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "qwen3_5": {
        **_HEADS_OF_256, **_DELTA,
        "rope_parameters": {**CONFIGS["qwen3_5"]["rope_parameters"], "mrope_section": [11, 11, 10]},
    },
    "nemotron_h": {
        **_HEADS_OF_128, "num_hidden_layers": 4, "ssm_state_size": 128, "mamba_head_dim": 64,
        "hybrid_override_pattern": ["M", "-", "M", "*"],
    },
    "falcon_h1": {**_HEADS_OF_128, **_MAMBA, "mamba_d_ssm": 512},
    "granitemoehybrid": {
        **_HEADS_OF_64, **_MAMBA, "mamba_n_heads": 16, "shared_intermediate_size": 512, "attention_multiplier": 0.125,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {**_HEADS_OF_64, "attn_layer_period": 2, "expert_layer_period": 2},
    "gemma3_text": {**_HEADS_OF_256, "query_pre_attn_scalar": 256, "sliding_window_pattern": 2},
    "gpt_oss": {**_HEADS_OF_64, "head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "vision:qwen3_5": {
        **_HEADS_OF_256, **_DELTA,
        "rope_parameters": {**FAMILIES["qwen3_5"][0]["text_config"]["rope_parameters"], "mrope_section": [11, 11, 10]},
        "tower": {"out_hidden_size": 512},
    },
}  # fmt: skip
# Their experts in bf16 need Metal: MLX's CPU backend multiplies gathered matrices in fp32 only.
MIXTURES = frozenset({"qwen3_next", "granitemoehybrid", "jamba", "gpt_oss"})
