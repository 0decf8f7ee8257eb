"""Tiny random checkpoints of the vision families this server promises, loadable like real ones. Knows no test.

Every one has its family's own processor files. Weights as in `checkpoints`: fp32, and replies wander.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer

from .checkpoints import VOCAB_SIZE, convert, randomise, tokenizer_config, train_tokenizer, write_tokenizer
from .language_families import language_config
from .mtp_heads import with_head
from .tokenizers import TEMPLATES
from .vision_families import FAMILIES

EXTRA_TOKENS = (
    "<|video_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
)  # fmt: skip
IMAGE_TOKENS = {
    "gemma3": "<image_soft_token>",
    "gemma4": "<image_soft_token>",
    "llava": "[IMG]",
    "pixtral": "[IMG]",
    "mistral3": "[IMG]",
}


def vision_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_str(train_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in EXTRA_TOKENS])
    return tokenizer


def write_vision_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    tower: dict[str, Any] | None = None,
    images: dict[str, Any] | None = None,
    mtp: bool = False,
    **text: Any,
) -> Path:
    """A checkpoint in `folder`, the same for the same arguments. `mtp`: it has an MTP head.

    `tower`, `images` and `text` change what config.json says of the tower, of image processing, of the language model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = vision_tokenizer()
    config, processed = copy.deepcopy(FAMILIES[family])
    family = config.get("model_type", family)
    config.get("text_config", config).update(text)
    config["vision_config"].update(tower or {})
    processed.update(images or {})
    config |= {"model_type": family, "vocab_size": VOCAB_SIZE, "torch_dtype": dtype, **_token_ids(tokenizer, family)}
    eos = [config["eos_token_id"]]
    _write_tokenizer(folder, tokenizer, family)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "do_sample": False})
    _write_json(folder / "preprocessor_config.json", processed)
    keys = ("processor_class", "image_seq_length", "max_soft_tokens", "pooling_kernel_size")
    if family == "llava":
        processed["image_token"] = IMAGE_TOKENS[family]
        keys = ("image_token", "patch_size", "vision_feature_select_strategy", "num_additional_image_tokens")
    processor = {key: processed[key] for key in keys if key in processed}
    _write_json(folder / "processor_config.json", {**processor, "image_processor": processed})
    model = _model(config)
    randomise(model, seed)
    if family.startswith("gemma"):  # the head is the embedding: at full size, a token would only repeat itself
        embedding = model.language_model.model.embed_tokens
        embedding.weight = 0.05 * embedding.weight
        if family == "gemma3":
            model.language_model.lm_head.weight = mx.array(embedding.weight)
    head = with_head(model, config["text_config"], seed) if mtp else {}
    convert(model, config, dtype)
    weights = dict(tree_flatten(model.parameters())) | head
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def write_language_checkpoint(folder: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """A checkpoint, in `folder`, of a family that only mlx-vlm knows. `overrides` change config.json.

    It is one of text, unless they hold a `vision_config`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = language_config(family) | overrides
    config["eos_token_id"] = write_tokenizer(folder, family)
    config.get("text_config", {}).update(eos_token_id=config["eos_token_id"])
    _write_json(folder / "config.json", config)
    model = _model(config)
    for name, part in list(model.items()):
        if isinstance(part, nn.Module) and name != "language_model" and "vision_config" not in config:
            setattr(model, name, None)
    randomise(model, seed)
    weights = {name: weight if weight.any() else weight + 0.5 for name, weight in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _model(config: dict[str, Any]) -> Any:
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    config = json.loads(json.dumps(config))
    family, _ = get_model_and_args(config=config)
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    settings = family.ModelConfig.from_dict(config)
    settings = update_module_configs(settings, family, config, ["text", "vision", "perceiver", "projector", "audio"])
    return family.Model(settings)


def _token_ids(tokenizer: Tokenizer, family: str) -> dict[str, Any]:
    ids = {"eos_token_id": "<end_of_turn>" if family.startswith("gemma") else "<|im_end|>"}
    image = IMAGE_TOKENS.get(family, "<|image_pad|>")
    match family:
        case "gemma3":
            ids |= {
                "image_token_index": image,
                "boi_token_index": "<start_of_image>",
                "eoi_token_index": "<end_of_image>",
            }
        case "gemma4":
            ids |= {"image_token_id": image, "boi_token_id": "<start_of_image>", "eoi_token_id": "<end_of_image>"}
        case "pixtral" | "mistral3" | "llava":
            ids |= {"image_token_index": image}
        case _:
            ids |= {
                "image_token_id": image,
                "video_token_id": "<|video_pad|>",
                "vision_start_token_id": "<|vision_start|>",
                "vision_end_token_id": "<|vision_end|>",
            }
    return {name: tokenizer.token_to_id(text) for name, text in ids.items()}


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, family: str) -> None:
    is_gemma = family.startswith("gemma")
    config = tokenizer_config(is_gemma=is_gemma)
    if is_gemma:
        image = IMAGE_TOKENS[family]
        config |= {"image_token": image, "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        config["image_token_id"] = tokenizer.token_to_id(image)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", config)
    template = (
        family if family == "gemma3" else "gemma4" if is_gemma else "mistral" if family in IMAGE_TOKENS else "qwen_vl"
    )
    shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1))
