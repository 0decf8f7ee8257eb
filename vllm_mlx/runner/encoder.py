"""Loads an encoder, and runs it: rows of token ids in, vectors or scores out. mlx-vlm has the modules."""

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
_PROBE_LENGTH = 64  # tokens of a text


class EncoderModel:
    """A loaded encoder. Pooling, dense layers and scaling are the checkpoint's, never its module's own."""

    def __init__(self, weights: list[Any], facts: EncoderFacts, config: dict[str, Any]):
        """`weights`: mlx-vlm's module, and the dense layers behind the pooling."""
        self.weights, self.module, self.facts = weights, weights[0], facts
        self.vocab_size, self.num_dimensions = int(config["vocab_size"]), facts.num_dimensions
        self._padding_id = int(config.get("pad_token_id") or 0)
        self._is_gemma = config["model_type"] == "gemma3_text"

    def check_logits(self) -> None:
        """Encode two rows. Raise ValueError if the results are not numbers, or all alike: weights are damaged."""
        result = self.encode([range(1, self.vocab_size, 1 + self.vocab_size // 16), [0, 1]])
        is_sound = mx.isfinite(result).all() & (result.max() > result.min())
        mx.eval(is_sound)
        mx.synchronize()  # a device fault is raised here, and is not taken for damage
        if not is_sound.item():
            raise ValueError("its weights are damaged, since its results are not numbers, or all alike")

    def probe(self, num_tokens: int) -> None:
        """Encode short texts of so many tokens together, and wait for the results."""
        length = min(num_tokens, _PROBE_LENGTH)
        mx.eval(self.encode([[0] * length] * (num_tokens // length)))

    def encode(self, rows: Rows, types: Rows | None = None) -> mx.array:
        """Return lazy float32: vectors `(rows, dimensions)`, or a reranker's scores `(rows,)` from 0 to 1.

        `types` are those of the tokens, all 0 if None. Rows are padded on the right: many modules count from column 0.
        """
        from mlx_vlm.models.pooling import normalize_embeddings, pool_by_config

        tokens, mask = _padded(rows, self._padding_id), _padded([[1] * len(row) for row in rows], 0)
        output = self._gemma(tokens, mask) if self._is_gemma else self.module(
            tokens, mask, token_type_ids=None if types is None else _padded(types, 0)
        )  # fmt: skip
        if self.facts.pooling is None:
            return mx.sigmoid(output.logits.astype(mx.float32)[:, 0])
        hidden = output if self._is_gemma else output.last_hidden_state
        result: mx.array = pool_by_config(hidden.astype(mx.float32), mask, {"pooling_mode": self.facts.pooling})
        for layer in self.module.dense if self._is_gemma else self.weights[1:]:
            result = layer(result)
        return normalize_embeddings(result) if self.facts.normalize else result

    def _gemma(self, tokens: mx.array, mask: mx.array) -> Any:
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
        places, real = mx.arange(mask.shape[1]), mask.astype(mx.bool_)
        whole = mx.broadcast_to(real[:, None, None, :], (len(mask), 1, mask.shape[1], mask.shape[1]))
        return whole, whole & ((mx.abs(places[:, None] - places) <= self.window) | ~real[:, None, :, None])


def begin_loading_encoder(
    checkpoint: Checkpoint, facts: EncoderFacts, *, slice_bytes: int = SLICE_BYTES
) -> Loading[EncoderModel]:
    """Begin to load the weights in slices. Raises ModelLoadError."""
    config = library_config(checkpoint.config)

    def build() -> list[Any]:
        dense = [_dense(checkpoint.path / folder, name) for folder, name in facts.dense.items()]
        return [_module(checkpoint.path, config, is_classifier=facts.pooling is None), *dense]

    def make(*weights: Any) -> EncoderModel:
        return EncoderModel([*weights], facts, config)

    return Loading(build, make, partial(explaining, checkpoint, "mlx-vlm", False), slice_bytes=slice_bytes)


def _module(path: Path, config: dict[str, Any], *, is_classifier: bool) -> Any:
    from mlx_vlm.embedding_loader import load_embedding_model
    from mlx_vlm.reranker_loader import load_sequence_classification_model

    with TemporaryDirectory(prefix="vllm-mlx-") as name:
        # mlx-vlm takes the weights in all subfolders for the module's. Only Gemma's module has such ones.
        folders = files_of(path, "*_Dense") if config["model_type"] == "gemma3_text" else []
        for file in [*model_files(path), *folders]:
            (Path(name) / file.name).symlink_to(file.absolute())
        load = load_sequence_classification_model if is_classifier else load_embedding_model
        module = load(Path(name), lazy=True, config=config)
    if config["model_type"] == "modernbert":
        module._masks = _Masks(module.local_attention // 2)  # with its own, padding has no numbers in float16
        for _, part in module.named_modules():
            if "act" in part:
                part.act = nn.GELU()  # its own is an approximation
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
