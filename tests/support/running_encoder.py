"""An encoder as the engine runs it, without the engine: texts in, vectors or scores out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_mlx.core.config import ModelConfig
from vllm_mlx.core.encoding import EncoderFacts
from vllm_mlx.core.request import TextInputs
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.texts import TextTokenizer
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.encoder import begin_loading_encoder
from vllm_mlx.runner.encoder_checkpoint import read_encoder


def facts_of(path: Path, **settings: Any) -> EncoderFacts | None:
    return read_encoder(find_checkpoint(str(path)), ModelConfig(model=str(path), **settings))


class RunningEncoder:
    def __init__(self, path: Path, **settings: Any):
        facts = facts_of(path, **settings)
        assert facts is not None
        self.facts = facts
        self.model = begin_loading_encoder(find_checkpoint(str(path)), facts).complete()
        self.tokenizer = TextTokenizer(Tokenizer.load(path), facts, self.model.vocab_size)

    def vectors(self, texts: Sequence[str | Sequence[int]], **options: Any) -> np.ndarray:
        """`(texts, dimensions)`, computed in one batch. `options` are fields of the request."""
        given = tuple(text if isinstance(text, str) else tuple(text) for text in texts)
        return self._encode(TextInputs(texts=given, **options))

    def ids_of(self, texts: Sequence[str], **options: Any) -> list[tuple[int, ...]]:
        """The token ids of each text."""
        found = self.tokenizer.prepare(TextInputs(texts=tuple(texts), **options))
        return [tuple(found.ids[start:end]) for start, end in found.spans]

    def scores(self, query: str, documents: Sequence[str], **options: Any) -> np.ndarray:
        return self._encode(TextInputs(texts=tuple(documents), query=query, **options))

    def _encode(self, inputs: TextInputs) -> np.ndarray:
        texts = self.tokenizer.prepare(inputs)
        rows = [texts.ids[start:end] for start, end in texts.spans]
        types = None if texts.types is None else [texts.types[start:end] for start, end in texts.spans]
        return np.array(self.model.encode(rows, types))


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
