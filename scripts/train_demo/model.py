"""The demo model: a small Qwen3.5-VL, its starting weights with a copying circuit, and its folder for MLX."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

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
    rope = {
        "rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
    }  # fmt: skip
    return {
        "model_type": "qwen3_5_text", "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "intermediate_size": 384, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": True, "eos_token_id": ids.turn_end,
        "pad_token_id": None,  # a padding id would freeze its embedding at zero
        "rope_parameters": rope,
    }  # fmt: skip


def vision_config() -> dict:
    return {
        "model_type": "qwen3_5_vision", "depth": 2, "hidden_size": 64, "intermediate_size": 128,
        "out_hidden_size": HIDDEN_SIZE, "num_heads": 2, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "num_position_embeddings": 64, "in_channels": 3,
    }  # fmt: skip


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


TOKEN, BEFORE, EARLIER, MIX = slice(1, 48), slice(48, 80), slice(80, 112), slice(112, 128)
NOTE = 32  # one value head
ROTARY = 16  # the first values of an attention head turn with position: matching leaves them out
CONSTANT = 0.5
TOKEN_STD = 0.12
NOTE_SCALE = 0.05
MIX_SCALE = 0.05
MIX_WEIGHT = 1.8
COPY_SCALE = (0.4, 0.02)  # layer 1 copies, layer 3 only leans towards it
SHARP = 2.0  # norm weights (1 + w) 3 and 2: logits up to 48, enough to single out one token of many thousands
MIX_FADE = 0.7


def rotation(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """(rows, columns) with orthonormal rows or columns, whichever are fewer."""
    size = max(rows, columns)
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0][:rows, :columns]


@torch.no_grad()
def write_circuit(language_model: nn.Module, quiet_ids: list[int], *, seed: int) -> None:
    """`quiet_ids` are tokens, such as the blank, that the mix of words leaves out."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = language_model.embed_tokens.weight
    embeddings.zero_()
    tokens = torch.empty(embeddings[:, TOKEN].shape).normal_(0, TOKEN_STD, generator=generator)
    embeddings[:, TOKEN] = tokens
    embeddings[:, 0] = CONSTANT
    reader = rotation(NOTE, tokens.shape[1], generator)
    write_notes(language_model.layers[0].linear_attn, reader, tokens[quiet_ids])
    for layer, scale in zip((1, 3), COPY_SCALE, strict=True):
        write_copier(language_model.layers[layer].self_attn, reader, scale, generator)


def write_notes(layer: nn.Module, reader: torch.Tensor, quiet: torch.Tensor) -> None:
    """Value heads 0 to 2 make the notes; head 3 keeps its random start."""
    values = 2 * layer.key_dim
    inward = layer.in_proj_qkv.weight
    inward[:values].mul_(0.1)
    inward[:values, 0] = rotation(2, 1, torch.Generator().manual_seed(0)).repeat(values // 2, 1)[:, 0]
    basis = torch.linalg.qr(quiet.T)[0]
    for head, read in enumerate((reader, reader, reader - reader @ basis @ basis.T)):
        rows = slice(values + head * NOTE, values + (head + 1) * NOTE)
        inward[rows] = 0.0
        inward[rows, TOKEN] = 0.2 * read  # small, so that the activation is nearly linear
    taps = layer.conv1d.weight[:, 0]
    taps.zero_()
    taps[:, 3] = 1.0
    for head, tap in enumerate((2, 1, 2)):  # one back, two back, one back
        rows = slice(values + head * NOTE, values + (head + 1) * NOTE)
        taps[rows] = 0.0
        taps[rows, tap] = 1.0
    write_gates(layer)
    outward = layer.out_proj.weight
    outward.zero_()
    for head, (block, scale) in enumerate(((BEFORE, NOTE_SCALE), (EARLIER, NOTE_SCALE), (MIX, MIX_SCALE))):
        width = block.stop - block.start
        outward[block, head * NOTE : head * NOTE + width] = scale * torch.eye(width)


def write_gates(layer: nn.Module) -> None:
    """Heads 0 and 1 forget at once, head 2 fades, head 3 remembers long; all output gates stand open."""
    for gate in (layer.in_proj_a, layer.in_proj_b, layer.in_proj_z):
        gate.weight.mul_(0.1)
    layer.dt_bias.fill_(1.0)
    fade = -math.log(MIX_FADE / 0.8) / 1.31 + 1e-3  # softplus(1) = 1.31; the delta rule takes 0.2 more
    layer.A_log.copy_(torch.tensor([8.0, 8.0, fade, 0.02]).log())
    layer.in_proj_b.weight[:, 0] = torch.tensor([0.5, 0.5, -0.3, 0.0])  # the constant reads as about 4.6
    layer.in_proj_z.weight[:, 0] = 0.5


def write_copier(layer: nn.Module, reader: torch.Tensor, scale: float, generator: torch.Generator) -> None:
    """Both key heads match (this, before) with (before, earlier); the second adds the mix."""
    size = layer.head_dim
    queries = layer.q_proj.weight.view(4, 2 * size, -1)  # per head: query, then its output gate
    queries[:, size:].mul_(0.1)
    copied = rotation(size, TOKEN.stop - TOKEN.start, generator)
    for head in (0, 1):
        here, back, mix = (rotation(size - ROTARY, n, generator) for n in (NOTE, NOTE, MIX.stop - MIX.start))
        query, key = torch.zeros(2, size, layer.q_proj.in_features)
        query[ROTARY:, TOKEN] = here @ reader
        query[ROTARY:, BEFORE] = back
        key[ROTARY:, BEFORE] = here
        key[ROTARY:, EARLIER] = back
        if head:
            query[ROTARY:, MIX] = key[ROTARY:, MIX] = MIX_WEIGHT * mix
        queries[2 * head : 2 * head + 2, :size] = query
        layer.k_proj.weight[head * size : (head + 1) * size] = key
        value = layer.v_proj.weight[head * size : (head + 1) * size]
        value.zero_()
        value[:, TOKEN] = copied
    layer.o_proj.weight.zero_()
    layer.o_proj.weight[TOKEN] = scale * copied.T.repeat(1, 4)
    layer.q_norm.weight.fill_(SHARP)
    layer.k_norm.weight.fill_(1.0)


MIN_PIXELS, MAX_PIXELS = 64 * 64, 224 * 224


def export(model: nn.Module, tokenizer, ids: TokenIds, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    complete_config(folder / "config.json", ids)
    stops = {"do_sample": False, "eos_token_id": [ids.turn_end, ids.text_end], "pad_token_id": ids.text_end}
    write_json(folder / "generation_config.json", stops)
    named = json.loads((folder / "tokenizer_config.json").read_text())
    named["tokenizer_class"] = "PreTrainedTokenizerFast"  # older and newer releases of transformers both know it
    write_json(folder / "tokenizer_config.json", named)
    write_json(folder / "preprocessor_config.json", preprocessor())
    write_json(folder / "processor_config.json", {"processor_class": "Qwen3VLProcessor"})


def complete_config(path: Path, ids: TokenIds) -> None:
    """Add values that MLX reads and the library omits: the layer interval, stop tokens at the top, no deepstack."""
    config = json.loads(path.read_text())
    config["text_config"]["full_attention_interval"] = LAYERS.index("full_attention") + 1
    config["vision_config"]["deepstack_visual_indexes"] = []
    config["eos_token_id"] = [ids.turn_end, ids.text_end]
    config["pad_token_id"] = ids.text_end
    write_json(path, config)


def preprocessor() -> dict:
    return {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.5] * 3, "image_processor_type": "Qwen2VLImageProcessorFast", "image_std": [0.5] * 3,
        "max_pixels": MAX_PIXELS, "merge_size": 2, "min_pixels": MIN_PIXELS, "patch_size": 16,
        "processor_class": "Qwen3VLProcessor", "rescale_factor": 1 / 255,
        "size": {"longest_edge": MAX_PIXELS, "shortest_edge": MIN_PIXELS}, "temporal_patch_size": 2,
    }  # fmt: skip


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
