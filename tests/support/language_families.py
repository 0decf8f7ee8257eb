"""Tiny config.json files of the families whose text only mlx-vlm runs. Knows no test."""

from typing import Any

from .checkpoints import BASE, GATED_DELTA, VOCAB_SIZE

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
INDEX: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
ROPE = {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
PATTERN = ["sliding_attention", "full_attention"] * 2
DIFFUSION_TEXT = {
    **BASE, "model_type": "diffusion_gemma_text", "head_dim": 16, "global_head_dim": 16, "sliding_window": 24,
    "layer_types": PATTERN,
}  # fmt: skip

# config.json's `model_type` → the rest of it, on top of BASE
LANGUAGES: dict[str, dict[str, Any]] = {
    "cohere2_moe": {**EXPERTS, "head_dim": 16, "sliding_window": 24, "num_shared_experts": 1, "layer_types": PATTERN},
    "deepseek_v4": {
        **ROUTED, **INDEX, "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32,
        "o_groups": 2, "o_lora_rank": 16, "num_hash_layers": 1, "sliding_window": 24,
        "compress_ratios": [0, 4, 128, 0],
    },
    "flint": {
        **EXPERTS, "head_dim": 16, "sliding_window": 24, "layer_types": PATTERN, "shared_expert_intermediate_size": 32,
    },
    "hrm_text": {"head_dim": 16, "num_key_value_heads": 4, "num_hidden_layers": 2, "H_cycles": 1, "L_cycles": 1},
    "hy_v4": {**ROUTED, **LATENT, **INDEX, "num_key_value_heads": 1}, "k2_horizon": {"head_dim": 16},
    "decider2": {**GATED_DELTA, "head_dim": 16, "rope_parameters": ROPE},
    "klear": {
        **EXPERTS, "attention_bias": False, "mlp_only_layers": [], "decoder_sparse_step": 1, "n_shared_experts": 1,
        "norm_topk_prob": True,
    },
    "kolibri1": {
        **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32, "sliding_window": 24, "layer_types": PATTERN,
    },
    "limite": {
        "head_dim": 16, "attn_gate_channels": 16, "ve_dim": 16, "ve_gate_channels": 8, "sliding_window": 24,
        "rope_n_pairs": 4, "global_layers": [1, 3], "mudd": False, "mudd_mlp": False, "xsa": False,
        "tie_word_embeddings": True, "softcap_logits": {"kind": "sigmoid", "a": 30.0, "b": 0.0, "c": 5.0},
    },
    "longcat_flash_sparse": {
        **LATENT, **INDEX, "num_layers": 2, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32, "moe_topk": 2,
        "n_routed_experts": 4,
    },
    "nemotron_labs_diffusion": {"head_dim": 16},  # token by token, unless config.json says otherwise
    "qwen3_5_moe_text": {**GATED_DELTA, **EXPERTS, "shared_expert_intermediate_size": 32, "rope_parameters": ROPE},
    "qwen3_5_text": {**GATED_DELTA, "rope_parameters": ROPE},
    "xing4_0": {
        **ROUTED, **LATENT, "num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1,
    },
    "z1t": {"max_position_embeddings": 1024},
    "mimo_v2": {
        **ROUTED, "head_dim": 16, "v_head_dim": 16, "swa_head_dim": 16, "swa_v_head_dim": 16,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "partial_rotary_factor": 0.5,
        "sliding_window_size": 24, "hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_dtype": "float32",
    },
    "step3p7": {
        "text_config": {
            **BASE, "model_type": "step3p5", "num_attention_groups": 2, "head_dim": 16, "moe_intermediate_size": 32,
            "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 32, "moe_layers_enum": "1,2,3",
            "layer_types": PATTERN, "sliding_window": 24,
        },
    },
    "glm5_next": {
        "text_config": {
            **BASE, **ROUTED, **LATENT, **INDEX, "model_type": "glm5_next_text", "num_key_value_heads": 4,
            "qk_rope_head_dim": 0, "qk_head_dim": 16, "index_kpool": 4, "linear_head_dim": 32, "linear_num_heads": 2,
            "first_k_dense_replace": 1,
        },
    },
    "qwen4_exp": {
        "text_config": {
            **BASE, **GATED_DELTA, **EXPERTS, "model_type": "qwen4_exp_text", "head_dim": 16,
            "shared_expert_intermediate_size": 32, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_head_dim": 16,
            "indexer_budget": 8, "rope_parameters": ROPE,
        },
    },
    "inkling": {
        "text_config": {
            **BASE, **ROUTED, "model_type": "inkling", "head_dim": 16, "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 24,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2, "d_rel": 4, "rel_extent": 32, "n_shared_experts": 1,
            "intermediate_size": 32, "dense_intermediate_size": 64, "dense_mlp_idx": 1,
        },
    },
    "mistral_large3": {
        "text_config": {
            **BASE, **ROUTED, **LATENT, "model_type": "mistral_large3", "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
        },
    },
    "minimax_m3": {
        "head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 64, "shared_intermediate_size": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 16,
        "index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1,
    },
}  # fmt: skip


# packages whose `Model` holds a language model, although it does not write a text token by token
SILENT = {
    "llada2_moe": {**EXPERTS, "head_dim": 16, "num_shared_experts": 1, "first_k_dense_replace": 1, "mask_token_id": 5},
    "llama_bidirec": {"head_dim": 16, "pooling": "avg"},
    "diffusion_gemma": {"text_config": DIFFUSION_TEXT, "canvas_length": 8},
}
# packages that read images, or make vectors of them: load tries each checkpoint with two images
WITH_IMAGES = frozenset({
    "aya_vision", "clef", "cohere_compass", "colidefics3", "colqwen2_5", "d1", "deepseek_vl_v2", "deepseekocr",
    "deepseekocr_2", "dots_ocr", "embedding_gemma2", "ernie4_5_moe_vl", "falcon_ocr", "falcon_perception", "fastvlm",
    "florence2", "glm4v", "glm4v_moe", "glm_ocr", "got", "granite4_vision", "granite_vision", "hunyuan_vl",
    "idefics2", "idefics3", "indic_ocr", "internvl", "internvl_chat", "jina_vlm", "lfm2_vl",
    "llama_nemotron_vl_embedding", "llava_bunny", "llava_next", "llava_onevision", "llmjpvl", "locateanything",
    "mage_vl", "minicpmo", "minicpmv4_6", "minicpmv4_7", "mllama", "molmo", "molmo2", "molmo_point", "moondream2",
    "moondream3", "multi_modality", "nemotron_h_nano_omni", "nemotron_parse", "paddleocr_vl", "paligemma", "phi3_v",
    "phi4_siglip", "phi4mm", "plamo2vl", "qwen3_omni_moe", "qwen3_vl_embedding", "smolvlm", "unlimited_ocr",
    "youtu_vl", "zaya1_vl",
})  # fmt: skip
OTHER_NAMES = frozenset({"lille_130m", "nemotron_nas"})  # mlx-lm has them, with a dash


def language_config(family: str) -> dict[str, Any]:
    own = {**LANGUAGES, **SILENT}[family]
    return {"model_type": family, "vocab_size": VOCAB_SIZE, **({} if "text_config" in own else BASE), **own}
