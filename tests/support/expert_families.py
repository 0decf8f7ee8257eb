"""A tiny config that most families of mlx-lm with experts can be made of. Knows no test."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm.models

from .checkpoints import BASE, GATED_DELTA, model_config, randomise
from .language_families import EXPERTS, LATENT, ROUTED

CONFIG: dict[str, Any] = {
    **BASE, **GATED_DELTA, **EXPERTS, **ROUTED, **LATENT,
    "head_dim": 16, "rope_scaling": None, "partial_rotary_factor": 0.5, "rotary_dim": 8, "model_max_length": 4096,
    # how many experts, and how many of them a token takes, in the words of each family
    "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_token": 2, "moe_topk": 2, "moe_top_k": 2, "moe_k": 2,
    "expert_ffn_hidden_size": 32, "ffn_hidden_size": 64, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 64, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    # which layers have experts
    "decoder_sparse_step": 1, "mlp_only_layers": [], "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_dense_layers": 1, "is_moe_layer": [True] * 4, "num_layers": 2,
    # how they are chosen
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "use_expert_bias": True,
    "zero_expert_num": 0, "zero_expert_type": "identity", "mup_enabled": False,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qkv_bias": False, "conv_bias": False,
    "conv_L_cache": 3, "norm_eps": 1e-6, "rms_norm_epsilon": 1e-6, "layer_norm_eps": 1e-5, "hidden_act": "silu",
    "use_qk_norm": True, "use_rmsnorm": True, "group_norm_size": 1, "layer_group_size": 2,
    "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_attention_groups": 2,
    "global_attn_every_n_layers": 2, "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "embedding_multiplier": 1.0, "attention_multiplier": 0.25, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4
    },
}  # fmt: skip
# Families that need another config.
OTHERS = frozenset({"deepseek_v2", "gemma4_text", "hunyuan", "kimi_k3", "mellum", "mimo_v2_flash", "minimax_m3_vl",
                    "mistral4", "muse_spark"})  # fmt: skip


def names() -> list[str]:
    """The families of mlx-lm that use its module of experts, by their sources."""
    found = [
        Path(mlx_lm.models.__path__[0], f"{each.name}.py") for each in pkgutil.iter_modules(mlx_lm.models.__path__)
    ]
    return [file.stem for file in found if file.is_file() and "= SwitchGLU(" in file.read_text()]


def make_model(name: str) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    try:
        config = model_config(name)
    except KeyError:
        config = {**CONFIG, "model_type": name}
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    randomise(model, 1)
    return model
