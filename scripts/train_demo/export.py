"""Writes the folder that mlx-lm and mlx-vlm load: weights in the library's own layout, configs, tokenizer, template."""

import json
from pathlib import Path

from torch import nn

from .model import LAYERS, TokenIds

MIN_PIXELS, MAX_PIXELS = 64 * 64, 224 * 224


def export(model: nn.Module, tokenizer, ids: TokenIds, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    complete_config(folder / "config.json", ids)
    stops = {"do_sample": False, "eos_token_id": [ids.turn_end, ids.text_end], "pad_token_id": ids.text_end}
    write_json(folder / "generation_config.json", stops)
    name_class(folder / "tokenizer_config.json")
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


def name_class(path: Path) -> None:
    """Return the class name that older and newer releases of transformers both know."""
    config = json.loads(path.read_text())
    write_json(path, config | {"tokenizer_class": "PreTrainedTokenizerFast"})


def preprocessor() -> dict:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5] * 3,
        "max_pixels": MAX_PIXELS,
        "merge_size": 2,
        "min_pixels": MIN_PIXELS,
        "patch_size": 16,
        "processor_class": "Qwen3VLProcessor",
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": MAX_PIXELS, "shortest_edge": MIN_PIXELS},
        "temporal_patch_size": 2,
    }


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
