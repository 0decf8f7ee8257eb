"""What config.json and preprocessor_config.json say in checkpoints of each vision family, tiny ones. Plain data."""

from typing import Any

from .checkpoints import BASE, GATED_DELTA, VOCAB_SIZE

MEAN_AND_STD = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "do_rescale": True}
MROPE = {"type": "default", "mrope_interleaved": True, "rope_theta": 10000.0}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 16}
QWEN3_TOWER: dict[str, Any] = {
    **TOWER, "model_type": "qwen3_vl", "depth": 3, "out_hidden_size": 64, "num_heads": 2, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 64, "in_channels": 3, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
QWEN3_IMAGES = {
    **MEAN_AND_STD, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64 * 64,
    "max_pixels": 256 * 256, "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor",
}  # fmt: skip
QWEN3_TEXT = {
    **BASE, "model_type": "qwen3_vl_text", "head_dim": 16, "rope_scaling": {**MROPE, "mrope_section": [2, 3, 3]},
}  # fmt: skip
GEMMA3_TEXT = {
    **BASE, "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "rope_global_base_freq": 10000.0,
    "rope_local_base_freq": 1000.0, "sliding_window": 24, "sliding_window_pattern": 3, "mm_tokens_per_image": 16,
}  # fmt: skip
GEMMA4_TEXT = {
    **BASE, "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 0, "sliding_window": 24,
    "sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_double_wide_mlp": False, "use_bidirectional_attention": "vision", "tie_word_embeddings": True,
}  # fmt: skip
PIXTRAL_TOWER = {
    **TOWER, "model_type": "pixtral", "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 128, "num_channels": 3,
}  # fmt: skip
PIXTRAL_IMAGES = {**MEAN_AND_STD, "patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 128}}

# Family → config.json and preprocessor_config.json. Names are config.json's model_type, where that says no other.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (
        {
            "text_config": {
                **BASE, **GATED_DELTA, "model_type": "qwen3_5_text",
                "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
            },
            "vision_config": {**QWEN3_TOWER, "model_type": "qwen3_5", "deepstack_visual_indexes": []},
        },
        QWEN3_IMAGES,
    ),
    "qwen2_5_vl": (
        {
            **BASE, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "vision_config": {
                **TOWER, "model_type": "qwen2_5_vl", "depth": 2, "out_hidden_size": 64, "num_heads": 2,
                "patch_size": 14, "spatial_patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
                "window_size": 56, "fullatt_block_indexes": [1], "in_channels": 3, "tokens_per_second": 2,
            },
        },
        {
            **QWEN3_IMAGES, "patch_size": 14, "min_pixels": 56 * 56, "max_pixels": 224 * 224,
            "size": {"shortest_edge": 56 * 56, "longest_edge": 224 * 224},
            "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
        },
    ),
    "qwen3_vl": ({"text_config": QWEN3_TEXT, "vision_config": QWEN3_TOWER}, QWEN3_IMAGES),
    "qwen3_vl_moe": (
        {
            "text_config": {
                **QWEN3_TEXT, "model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
                "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 32,
            },
            "vision_config": {**QWEN3_TOWER, "model_type": "qwen3_vl_moe"},
        },
        QWEN3_IMAGES,
    ),
    "gemma3": (
        {
            "hidden_size": 64, "mm_tokens_per_image": 16, "text_config": GEMMA3_TEXT,
            "vision_config": {
                **TOWER, "model_type": "siglip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2,
                "patch_size": 14, "image_size": 112,
            },
        },
        {
            **MEAN_AND_STD, "do_normalize": True, "size": {"height": 112, "width": 112}, "image_seq_length": 16,
            "do_pan_and_scan": False, "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
        },
    ),
    "gemma4": (
        {
            "hidden_size": 64, "text_config": GEMMA4_TEXT,
            "vision_config": {
                **TOWER, "model_type": "gemma4_vision", "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "default_output_length": 20,
                "position_embedding_size": 64, "pooling_kernel_size": 2,
            },
            "audio_config": None,
        },
        {
            "image_processor_type": "Gemma4ImageProcessor", "processor_class": "Gemma4Processor",
            "image_seq_length": 20, "max_soft_tokens": 20, "pooling_kernel_size": 2, "patch_size": 16,
        },
    ),
    "pixtral": (
        {"text_config": {**BASE, "model_type": "mistral", "head_dim": 16}, "vision_config": PIXTRAL_TOWER},
        {**PIXTRAL_IMAGES, "image_processor_type": "PixtralImageProcessor", "processor_class": "PixtralProcessor"},
    ),
    "mistral3": (
        {
            "text_config": {
                **BASE, "model_type": "ministral3", "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                    "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
                },
            },
            "vision_config": PIXTRAL_TOWER, "spatial_merge_size": 2,
        },
        {**PIXTRAL_IMAGES, "image_processor_type": "PixtralImageProcessor", "processor_class": "PixtralProcessor"},
    ),
}  # fmt: skip
FAMILIES |= {
    "qwen2_vl": (
        {
            **FAMILIES["qwen2_5_vl"][0],
            "vision_config": {
                "model_type": "qwen2_vl", "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2,
                "patch_size": 14, "mlp_ratio": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
                "image_size": 56,
            },
        },
        {**FAMILIES["qwen2_5_vl"][1], "processor_class": "Qwen2VLProcessor"},
    ),
    "qwen3_5_moe": (
        {
            "text_config": {
                **FAMILIES["qwen3_5"][0]["text_config"], "model_type": "qwen3_5_moe_text", "num_experts": 4,
                "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            },
            "vision_config": {**FAMILIES["qwen3_5"][0]["vision_config"], "model_type": "qwen3_5_moe"},
        },
        QWEN3_IMAGES,
    ),
    # As the small ones: inputs for each layer, layers that share KV, images read in one direction.
    "gemma4_small": (
        {
            **FAMILIES["gemma4"][0], "model_type": "gemma4",
            "text_config": {
                **GEMMA4_TEXT, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
                "use_bidirectional_attention": None, "use_double_wide_mlp": True,
            },
        },
        FAMILIES["gemma4"][1],
    ),
    "gemma4_moe": (
        {
            **FAMILIES["gemma4"][0], "model_type": "gemma4",
            "text_config": {
                **GEMMA4_TEXT, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                "moe_intermediate_size": 32,
            },
        },
        FAMILIES["gemma4"][1],
    ),
    # No code of ours knows this one.
    "llava": (
        {
            "text_config": {**BASE, "model_type": "llama"},
            "vision_config": {
                **TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 3, "num_attention_heads": 2,
                "image_size": 96, "projection_dim": 32, "vocab_size": VOCAB_SIZE,
            },
        },
        {
            **MEAN_AND_STD, "do_center_crop": True, "crop_size": {"height": 96, "width": 96},
            "size": {"shortest_edge": 96}, "patch_size": 16, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1, "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
        },
    ),
}  # fmt: skip
