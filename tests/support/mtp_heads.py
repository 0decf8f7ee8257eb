"""MTP heads of tiny checkpoints of the Qwen 3.5 family, in the tensors and names that real checkpoints have.

A head of random weights guesses nothing. Here the layers of the model add little to a token's embedding, so that the
next token depends mostly on the last one, and the head passes the embedding on. It is therefore right sometimes.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

_ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")  # what a layer adds to its input
SHARE = 0.05  # of what the layers of a random model add


def with_head(model: nn.Module, text: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """Let the layers of the language model add less, and make the tensors of a head that is right sometimes then.

    `text` are the model's text settings. The names are those of checkpoints.
    """
    weights = tree_flatten(model.language_model.parameters())
    softened = [(name, SHARE * weight) for name, weight in weights if name.endswith(_ADDING)]
    model.language_model.load_weights(softened, strict=False)
    return head_tensors(text, seed + 1)


def head_tensors(text: dict[str, Any], seed: int) -> dict[str, mx.array]:
    from mlx_vlm.speculative.drafters.qwen3_5_mtp import Model, ModelConfig

    from .checkpoints import randomise

    head = Model(ModelConfig.from_dict({"text_config": text}))
    randomise(head, seed)
    width = text["hidden_size"]
    head.fc.weight = mx.concatenate([mx.eye(width), 0.05 * mx.random.normal((width, width))], axis=1)
    weights = dict(tree_flatten(head.parameters()))
    for name, weight in weights.items():
        if name.endswith(_ADDING):
            weights[name] = SHARE * weight
        elif _is_norm(name):
            weights[name] = mx.ones_like(weight)
    return {f"mtp.{name}": weight for name, weight in weights.items()}


def _is_norm(name: str) -> bool:
    return "norm" in name.removesuffix(".weight").rpartition(".")[2]


def shifted(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The same tensors as in an original of Hugging Face, whose norms are stored less one."""
    return {name: tensor - 1 if _is_norm(name) else tensor for name, tensor in tensors.items()}


def write_split(folder: Path, config: dict[str, Any], tensors: dict[str, mx.array]) -> Path:
    """A folder with the head alone, as mlx-vlm splits it off."""
    folder.mkdir(parents=True)
    split = {"model_type": "qwen3_5_mtp", "text_config": config["text_config"], "block_size": 3}
    (folder / "config.json").write_text(json.dumps(split))
    weights = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
