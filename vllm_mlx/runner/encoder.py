"""Loads an encoder, and runs it: rows of token ids in, vectors or scores out. mlx-vlm has the modules.

Pooling, dense layers and scaling are the checkpoint's, never a module's own. Rows are padded on the right, because
several families count positions from the first column.
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

_NUM_CHECKED = 8  # tokens of a row of the look at a loaded model's output


class EncoderModel:
    """A loaded encoder. `dense` are the layers behind the pooling. It keeps no state of any request."""

    def __init__(self, module: Any, dense: Sequence[Any], facts: EncoderFacts, config: dict[str, Any]):
        self.module, self._dense, self.facts = module, dense, facts
        self.vocab_size = int(config["vocab_size"])
        self.num_dimensions = facts.num_dimensions
        self._padding_id = int(config.get("pad_token_id") or 0)
        self._is_gemma = config["model_type"] == "gemma3_text"
        if self._is_gemma:
            self._masks = _Masks(module.config.sliding_window // 2)
        if config["model_type"] == "modernbert":
            module._masks = _Masks(
                module.local_attention // 2
            )  # the module's own ones leave padded tokens none to see in float16
            for _, part in module.named_modules():
                if "act" in part:
                    part.act = nn.GELU()  # it computes an approximation

    @property
    def weights(self) -> list[Any]:
        """Return the modules that hold weights."""
        return [self.module, *self._dense]

    def check_logits(self) -> None:
        """Encode two rows. Raise ValueError if the results are not numbers, or all alike: weights are damaged."""
        step = max(1, self.vocab_size // (2 * _NUM_CHECKED))
        tokens = [place * step % self.vocab_size for place in range(1, 2 * _NUM_CHECKED)]
        result = self._compute([tokens[::2], tokens[1::2]], None)
        is_sound = mx.isfinite(result).all() & (result.max() > result.min())
        mx.eval(is_sound)
        mx.synchronize()  # a device fault is raised here, and is not taken for damage
        if not is_sound.item():
            raise ValueError("its weights are damaged, since its results are not numbers, or all alike")

    def encode(self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> mx.array:
        """Return lazy float32: vectors `(rows, dimensions)`, or a reranker's scores `(rows,)` from 0 to 1.

        `types` are those of the tokens; None stands for 0 everywhere.
        """
        from mlx_vlm.models.pooling import normalize_embeddings

        result = self._compute(rows, types)
        if self.facts.pooling is None:
            return mx.sigmoid(result[:, 0])
        return normalize_embeddings(result) if self.facts.normalize else result

    def _compute(self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None) -> mx.array:
        """Return the classifier's logits, or the vectors before they are scaled."""
        from mlx_vlm.models.pooling import pool_by_config

        length = max(map(len, rows))
        tokens = _padded(rows, length, self._padding_id)
        mask = mx.arange(length) < mx.array([[len(row)] for row in rows])
        more = {} if types is None else {"token_type_ids": _padded(types, length, 0)}
        if self._is_gemma:
            hidden = self._gemma_states(tokens, mask)
        else:
            output = self.module(tokens, attention_mask=mask.astype(mx.int32), **more)
            hidden = output.logits if self.facts.pooling is None else output.last_hidden_state
        result: mx.array = hidden.astype(mx.float32)
        if self.facts.pooling is not None:
            result = pool_by_config(result, mask.astype(mx.int32), {"pooling_mode": self.facts.pooling})
        for layer in self.module.dense if self._is_gemma else self._dense:
            result = layer(result)
        return result.astype(mx.float32)

    def _gemma_states(self, tokens: mx.array, mask: mx.array) -> Any:
        """Return the last hidden states. In the module's own pass, layers with a window see all tokens."""
        model = self.module.model
        whole, near = self._masks(mask)
        hidden = model.embed_tokens(tokens) * model.config.hidden_size**0.5
        for layer in model.layers:
            hidden = layer(hidden, near if layer.self_attn.is_sliding else whole, None)
        return model.norm(hidden)


@dataclass(frozen=True, slots=True)
class _Masks:
    """Makes the mask of all real tokens, and that of tokens at most `window` away.

    Padded tokens see all real ones, since a token that sees none has no number as its state.
    """

    window: int

    def __call__(self, mask: mx.array, dtype: Any = None) -> tuple[mx.array, mx.array]:
        real, places = mask.astype(mx.bool_), mx.arange(mask.shape[1])
        whole = mx.broadcast_to(real[:, None, None, :], (*mask.shape[:1], 1, mask.shape[1], mask.shape[1]))
        return whole, whole & ((mx.abs(places[:, None] - places) <= self.window) | ~real[:, None, :, None])


def begin_loading_encoder(
    checkpoint: Checkpoint, facts: EncoderFacts, *, slice_bytes: int = SLICE_BYTES
) -> Loading[EncoderModel]:
    """Begin to load the weights in slices. Raises ModelLoadError."""
    config, path = library_config(checkpoint.config), checkpoint.path
    is_gemma = checkpoint.architecture == "gemma3_text"

    def build() -> list[Any]:
        from mlx_vlm.embedding_loader import load_embedding_model
        from mlx_vlm.reranker_loader import load_sequence_classification_model

        load = load_embedding_model if facts.pooling else load_sequence_classification_model
        with TemporaryDirectory(prefix="vllm-mlx-") as name:
            # mlx-vlm reads the weights in all subfolders, of which only Gemma's module can take some.
            for file in [*model_files(path), *(files_of(path, "*_Dense") if is_gemma else ())]:
                (Path(name) / file.name).symlink_to(file.absolute())
            module = load(Path(name), lazy=True, config=config)
        return [module, *(_dense_layer(path / layer.folder, layer.activation) for layer in facts.dense)]

    def make(module: Any, *dense: Any) -> EncoderModel:
        return EncoderModel(module, dense, facts, config)

    return Loading(build, make, partial(explaining, checkpoint, "mlx-vlm", False), slice_bytes=slice_bytes)


def _dense_layer(folder: Path, activation: str) -> Any:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    linear = nn.Linear(*reversed(weights["linear.weight"].shape), bias="linear.bias" in weights)
    linear.load_weights([(name.removeprefix("linear."), array) for name, array in weights.items()])
    return nn.Sequential(linear, getattr(nn, activation)())


def _padded(rows: Sequence[Sequence[int]], length: int, value: int) -> mx.array:
    padded = np.full((len(rows), length), value, np.int32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return mx.array(padded)
