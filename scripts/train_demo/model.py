"""The demo model's shape: a small Qwen3.5-VL. Weights are drawn here."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

VOCAB_SIZE = 2048
HIDDEN_SIZE = 128
MAX_POSITIONS = 131_072
LAYERS = ["linear_attention", "full_attention"] * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """The ids that the config names."""

    image: int
    video: int
    vision_start: int
    vision_end: int
    turn_end: int
    text_end: int


def text_config(ids: TokenIds) -> dict:
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": len(LAYERS),
        "layer_types": LAYERS,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "eos_token_id": ids.turn_end,
        "pad_token_id": None,  # a padding id would freeze its embedding at zero
        "rope_parameters": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
    }


def vision_config() -> dict:
    return {
        "model_type": "qwen3_5_vision",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "out_hidden_size": HIDDEN_SIZE,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "in_channels": 3,
    }


def build(ids: TokenIds) -> Qwen3_5ForConditionalGeneration:
    """Return the model with its starting weights; uses torch's global seed."""
    config = Qwen3_5Config(
        text_config=text_config(ids),
        vision_config=vision_config(),
        image_token_id=ids.image,
        video_token_id=ids.video,
        vision_start_token_id=ids.vision_start,
        vision_end_token_id=ids.vision_end,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    model = Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():
        draw_weights(model)
    return model


def draw_weights(model: nn.Module) -> None:
    """Draw wider weights than the library's 0.02, which suits larger models. Residual outputs start at zero."""
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            nn.init.normal_(weight, std=0.1)
        elif "patch_embed.proj.weight" in name:
            nn.init.normal_(weight, std=1 / math.sqrt(weight[0].numel()))
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif weight.ndim == 2:
            nn.init.normal_(weight, std=0.7 / math.sqrt(weight.shape[1]))
        if name.endswith("A_log"):  # a spread of memory lengths
            weight.copy_(torch.linspace(math.log(0.03), math.log(8.0), len(weight)))
