"""Loads an encoder, and runs it: rows of token ids in, vectors or scores out. mlx-vlm has the modules.

Pooling, dense layers and scaling are the checkpoint's, never a module's own. Rows are padded on the right: several
families count positions from the first column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..core.encoding import EncoderFacts
from .checkpoint import Checkpoint
from .encoder_checkpoint import library_config
from .load_model import explaining
from .loading import SLICE_BYTES, Loading
from .weight_files import files_of, model_files

Rows = Sequence[Sequence[int]]
_NUM_CHECKED = 16  # tokens of the look at a loaded model's output


class EncoderModel:
    """A loaded encoder. It keeps no state of any request."""

    def __init__(self, modules: Sequence[Any], facts: EncoderFacts, config: dict[str, Any]):
        """`modules`: mlx-vlm's, and the dense layers behind the pooling."""
        self.weights = list(modules)  # the modules that hold weights
        self.module, self.facts = modules[0], facts
        self.vocab_size, self.num_dimensions = int(config["vocab_size"]), facts.num_dimensions
        self._padding_id = int(config.get("pad_token_id") or 0)
        self._is_gemma = config["model_type"] == "gemma3_text"
        self._dense = self.module.dense if self._is_gemma else modules[1:]

    def check_logits(self) -> None:
        """Encode two rows. Raise ValueError if the results are not numbers, or all alike: weights are damaged."""
        tokens = [place * (self.vocab_size // _NUM_CHECKED) for place in range(_NUM_CHECKED)]
        result = self._compute([tokens[::2], tokens[1::2]], None)
        is_sound = mx.isfinite(result).all() & (result.max() > result.min())
        mx.eval(is_sound)
        mx.synchronize()  # a device fault is raised here, and is not taken for damage
        if not is_sound.item():
            raise ValueError("its weights are damaged, since its results are not numbers, or all alike")

    def encode(self, rows: Rows, types: Rows | None = None) -> mx.array:
        """Return lazy float32: vectors `(rows, dimensions)`, or a reranker's scores `(rows,)` from 0 to 1.

        `types` are those of the tokens; None stands for 0 everywhere.
        """
        from mlx_vlm.models.pooling import normalize_embeddings

        result = self._compute(rows, types)
        if self.facts.pooling is None:
            return mx.sigmoid(result[:, 0])
        return normalize_embeddings(result) if self.facts.normalize else result

    def _compute(self, rows: Rows, types: Rows | None) -> mx.array:
        """Return the classifier's logits, or the vectors before they are scaled."""
        from mlx_vlm.models.pooling import pool_by_config

        tokens = _padded(rows, self._padding_id)
        mask = _padded([[1] * len(row) for row in rows], 0)
        if self._is_gemma:
            hidden = self._gemma_states(tokens, mask)
        else:
            output = self.module(tokens, mask, token_type_ids=None if types is None else _padded(types, 0))
            hidden = output.logits if self.facts.pooling is None else output.last_hidden_state
        result: mx.array = hidden.astype(mx.float32)
        if self.facts.pooling is not None:
            result = pool_by_config(result, mask, {"pooling_mode": self.facts.pooling})
        for layer in self._dense:
            result = layer(result)
        return result

    def _gemma_states(self, tokens: mx.array, mask: mx.array) -> Any:
        """Return the last hidden states. In the module's own pass, layers with a window see all tokens."""
        model = self.module.model
        whole, near = _Masks(model.window_size // 2)(mask)
        hidden = model.embed_tokens(tokens) * model.config.hidden_size**0.5
        for layer in model.layers:
            hidden = layer(hidden, near if layer.self_attn.is_sliding else whole)
        return model.norm(hidden)


@dataclass(frozen=True, slots=True)
class _Masks:
    """Makes the mask of all real tokens, and that of those at most `window` away. Padded tokens see all real ones."""

    window: int

    def __call__(self, mask: mx.array, dtype: Any = None) -> tuple[mx.array, mx.array]:
        real, places = mask.astype(mx.bool_), mx.arange(mask.shape[1])
        whole = mx.broadcast_to(real[:, None, None, :], (len(mask), 1, mask.shape[1], mask.shape[1]))
        return whole, whole & ((mx.abs(places[:, None] - places) <= self.window) | ~real[:, None, :, None])


def begin_loading_encoder(
    checkpoint: Checkpoint, facts: EncoderFacts, *, slice_bytes: int = SLICE_BYTES
) -> Loading[EncoderModel]:
    """Begin to load the weights in slices. Raises ModelLoadError."""
    config, path = library_config(checkpoint.config), checkpoint.path

    def build() -> list[Any]:
        return [_module(checkpoint, config, facts), *(_dense(path / name, kind) for name, kind in facts.dense.items())]

    def make(*modules: Any) -> EncoderModel:
        return EncoderModel(modules, facts, config)

    return Loading(build, make, partial(explaining, checkpoint, "mlx-vlm", False), slice_bytes=slice_bytes)


def _module(checkpoint: Checkpoint, config: dict[str, Any], facts: EncoderFacts) -> Any:
    from mlx_vlm.embedding_loader import load_embedding_model
    from mlx_vlm.reranker_loader import load_sequence_classification_model

    load, family = load_embedding_model if facts.pooling else load_sequence_classification_model, config["model_type"]
    with TemporaryDirectory(prefix="vllm-mlx-") as name:
        # mlx-vlm takes the weights in all subfolders for the module's. Only Gemma's module has such ones.
        folders = files_of(checkpoint.path, "*_Dense") if family == "gemma3_text" else []
        for file in [*model_files(checkpoint.path), *folders]:
            (Path(name) / file.name).symlink_to(file.absolute())
        module = load(Path(name), lazy=True, config=config)
    if family == "modernbert":  # its GELU is approximate, and in float16 its masks let some padded tokens see none
        module._masks = _Masks(module.local_attention // 2)
        for _, part in module.named_modules():
            if "act" in part:
                part.act = nn.GELU()
    return module


def _dense(folder: Path, activation: str) -> nn.Module:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    linear = nn.Linear(*reversed(weights["linear.weight"].shape), bias="linear.bias" in weights)
    linear.load_weights([(name.removeprefix("linear."), array) for name, array in weights.items()])
    return nn.Sequential(linear, getattr(nn, activation)())


def _padded(rows: Rows, value: int) -> mx.array:
    padded = np.full((len(rows), max(map(len, rows))), value, np.int32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return mx.array(padded)
