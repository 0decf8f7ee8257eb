"""Checkpoints with the widths of real models, and what the Metal kernels that real models run on ask of widths.

The tiny checkpoints run everywhere, but on a Mac they run on slow general code. These run on the kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoints import ARCHITECTURES, CONFIGS, VISION, model_config
from .vision_families import FAMILIES

Config = Mapping[str, Any]

_COMMON: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
_HEADS_OF_64: dict[str, Any] = {**_COMMON, "num_attention_heads": 8, "num_key_value_heads": 2}
_HEADS_OF_128: dict[str, Any] = {**_COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
_HEADS_OF_256: dict[str, Any] = {**_COMMON, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
_DELTA: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 2}
_MAMBA: dict[str, Any] = {"mamba_d_state": 128, "mamba_d_head": 64}

# Architecture → changes of the tiny checkpoint's config.json.
WIDE: dict[str, dict[str, Any]] = {
    "llama": _HEADS_OF_64,
    "qwen3": _HEADS_OF_128,
    "qwen3_next": {
        **_HEADS_OF_256,
        **_DELTA,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_5": {
        **_HEADS_OF_256,
        **_DELTA,
        "rope_parameters": {**CONFIGS["qwen3_5"]["rope_parameters"], "mrope_section": [11, 11, 10]},
    },
    "nemotron_h": {
        **_HEADS_OF_128,
        "num_hidden_layers": 4,
        "ssm_state_size": 128,
        "mamba_head_dim": 64,
        "hybrid_override_pattern": ["M", "-", "M", "*"],
    },
    "falcon_h1": {**_HEADS_OF_128, **_MAMBA, "mamba_d_ssm": 512},
    "granitemoehybrid": {
        **_HEADS_OF_64,
        **_MAMBA,
        "mamba_n_heads": 16,
        "shared_intermediate_size": 512,
        "attention_multiplier": 0.125,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {**_HEADS_OF_64, "attn_layer_period": 2, "expert_layer_period": 2},
    "gemma3_text": {**_HEADS_OF_256, "query_pre_attn_scalar": 256, "sliding_window_pattern": 2},
    "gpt_oss": {**_HEADS_OF_64, "head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "vision:qwen3_5": {
        **_HEADS_OF_256,
        **_DELTA,
        "rope_parameters": {**FAMILIES["qwen3_5"][0]["text_config"]["rope_parameters"], "mrope_section": [11, 11, 10]},
        "tower": {"out_hidden_size": 512},
    },
}
# Their experts in bf16 need Metal: MLX's CPU backend multiplies gathered matrices in fp32 only.
MIXTURES = frozenset({"qwen3_next", "granitemoehybrid", "jamba", "gpt_oss"})


def wide_config(architecture: str) -> dict[str, Any]:
    """The text settings of the wide checkpoint's config.json."""
    return text_config(architecture, **{name: value for name, value in WIDE[architecture].items() if name != "tower"})


def text_config(architecture: str, **changes: Any) -> dict[str, Any]:
    if architecture in ARCHITECTURES:
        config = model_config(architecture, **changes)
        return dict(config.get("text_config", config))
    family = FAMILIES[architecture.removeprefix(VISION)][0]
    return {**family.get("text_config", family), **changes}


@dataclass(frozen=True, slots=True)
class Condition:
    """What a kernel of Metal asks of widths; without it, slower code runs, or wrong numbers come out."""

    kernel: str
    asks: str
    file: str  # in MLX's repository at 0.32.2, in mlx_lm 0.32.2, or in mlx_vlm 0.7.10
    lines: str
    text: str  # a part of these lines
    concerns: Callable[[Config], bool]
    holds: Callable[[Config], bool]
    is_checked: bool = True  # by the library, which runs other code instead


def head_width(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def state_width(config: Config) -> int | None:
    """The width of a Mamba2 state. Jamba's Mamba has plain operations of its own."""
    if "ssm_state_size" in config:
        return int(config["ssm_state_size"])
    return int(config["mamba_d_state"]) if "mamba_d_head" in config else None


def product_widths(config: Config) -> list[int]:
    """The widths of the inputs of large products."""
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_intermediate_size")
    return [config[name] for name in names if name in config]


def _always(config: Config) -> bool:
    return True


def _has_delta(config: Config) -> bool:
    return "linear_key_head_dim" in config


CONDITIONS = (
    Condition(
        "vector attention (decode, up to 8 queries)",
        "head width 64, 96, 128 or 256; queries × query heads per KV head at most 32",
        "mlx/backend/metal/scaled_dot_product_attention.cpp",
        "682-709",
        "query_sequence_length * gqa_factor > 32",
        _always,
        lambda config: (
            head_width(config) in (64, 96, 128, 256)
            and config["num_attention_heads"] // config["num_key_value_heads"] <= 32
        ),
    ),
    Condition(
        "full attention (prefill, more than 8 queries)",
        "head width 64, 72, 80, 96 or 128; 256 has a kernel, which runs only if it is forced, or on M5 from 1,024 on",
        "mlx/backend/metal/scaled_dot_product_attention.cpp",
        "662-671, 754-763",
        "query_head_dim == 192 || query_head_dim == 256",
        lambda config: head_width(config) != 256,
        lambda config: head_width(config) in (64, 72, 80, 96, 128),
    ),
    Condition(
        "gated delta, generic, of mlx-vlm",
        "Dk is a multiple of 32, unchecked: otherwise part of the state is neither read nor written",
        "mlx_vlm/models/qwen3_5/gated_delta.py",
        "587-597",
        "if not use_kernel or mx.default_device() != mx.gpu or not mx.metal.is_available():",
        _has_delta,
        lambda config: config["linear_key_head_dim"] % 32 == 0,
        is_checked=False,
    ),
    Condition(
        "gated delta, generic, of mlx-lm",
        "Dk is a multiple of 32; otherwise plain operations run",
        "mlx_lm/models/gated_delta.py",
        "639-647",
        "or k.shape[-1] % 32 != 0",
        _has_delta,
        lambda config: config["linear_key_head_dim"] % 32 == 0,
    ),
    Condition(
        "gated delta, packed, of both",
        "Dk = 128, Dv a multiple of 8",
        "mlx_lm/models/gated_delta.py",
        "449-456",
        "and Dk == 128",
        _has_delta,
        lambda config: config["linear_key_head_dim"] == 128 and config["linear_value_head_dim"] % 8 == 0,
    ),
    Condition(
        "Mamba2 step",
        "d_state is a multiple of 32, unchecked: with 16, the state is neither read nor written",
        "mlx_lm/models/ssm.py",
        "23",
        "constexpr int n_per_t = Ds / 32;",
        lambda config: state_width(config) is not None,
        lambda config: (state_width(config) or 0) % 32 == 0,
        is_checked=False,
    ),
    Condition(
        "ragged decode attention of mlx-vlm's qwen3_5",
        "head width 64, 96, 128 or 256, in bf16 or fp16",
        "mlx_vlm/models/qwen3_5/language.py",
        "713-738",
        "or d_size not in (64, 96, 128, 256)",
        lambda config: str(config["model_type"]).startswith("qwen3_5"),
        lambda config: head_width(config) in (64, 96, 128, 256),
    ),
    Condition(
        "quantised product of one row (qmv_fast, 4 bits)",
        "inputs a multiple of 512, outputs of 8; otherwise qmv runs",
        "mlx/backend/metal/quantized.cpp",
        "145-149, 484",
        "K % qmv_fast_k_alignment(bits) == 0",
        _always,
        lambda config: all(width % 512 == 0 for width in product_widths(config)),
    ),
    Condition(
        "quantised product of several rows (qmm)",
        "inputs in groups of 64, outputs a multiple of 32 for the aligned kernel",
        "mlx/backend/metal/quantized.cpp",
        "1071",
        "bool aligned = N % 32 == 0;",
        _always,
        lambda config: all(width % 64 == 0 for width in (*product_widths(config), head_width(config))),
    ),
)
