"""Rows that decode in one forward pass. A batch of one row keeps its caches unpadded."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache import layers
from ..cache.layers import LayerCaches
from ..core.events import TokenLogprob
from ..core.sequence import Sequence
from ..core.step import TokenOutput
from .masks import Words
from .model import Model
from .sampler import Sampled, Sampler


@dataclass(slots=True)
class InFlight:
    """A launched forward pass whose samples have not been read yet."""

    seqs: list[Sequence]
    sampled: Sampled

    def read(self) -> list[TokenOutput]:
        """Wait for the device and return one token per row."""
        tokens = _values(self.sampled.tokens)
        logprobs = self._logprobs(tokens)
        return [
            TokenOutput(seq.seq_id, token, logprob)
            for seq, token, logprob in zip(self.seqs, tokens, logprobs, strict=True)
        ]

    def _logprobs(self, tokens: list[int]) -> list[TokenLogprob | None]:
        if self.sampled.logprobs is None:
            return [None] * len(tokens)
        chosen = _values(self.sampled.logprobs)
        tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
        if self.sampled.top_ids is not None and self.sampled.top_logprobs is not None:
            pairs = zip(_values(self.sampled.top_ids), _values(self.sampled.top_logprobs), strict=True)
            tops = [list(zip(ids, values, strict=True)) for ids, values in pairs]
        return [
            None if k is None else TokenLogprob(token, value, tuple(top[:k]))
            for k, token, value, top in zip(
                (seq.sampling.num_top_logprobs for seq in self.seqs), tokens, chosen, tops, strict=True
            )
        ]


def _values(array: mx.array) -> list[Any]:
    values: Any = array.tolist()
    return list(values)


class Batch:
    def __init__(self, model: Model, seqs: list[Sequence], caches: LayerCaches, tokens: mx.array):
        self.seqs = seqs
        self._model = model
        self._caches = caches
        self._tokens = tokens  # (rows,) fed by the next launch
        self._sampler: Sampler | None = None
        self._counters: list[Any] | None = None  # caches that are given the rows' lengths
        self._logits: mx.array | None = None  # (rows, vocab) of a forward pass whose tokens are not drawn yet

    @property
    def seq_ids(self) -> list[int]:
        return [seq.seq_id for seq in self.seqs]

    @property
    def caches(self) -> LayerCaches:
        return self._caches

    @property
    def nbytes(self) -> int:
        return layers.state_bytes(self._caches)

    def launch(self) -> InFlight:
        """Start one forward pass and its sampling without waiting. The next launch feeds the samples."""
        self._forward()
        return self.draw(None)

    def start(self) -> None:
        """Start one forward pass, which `draw` follows. Masks are computed while the device works."""
        mx.async_eval(self._forward())  # type: ignore[no-untyped-call]

    def draw(self, words: Words | None) -> InFlight:
        """Start the sampling after a forward pass. `words` are the masks of the rows, as the sampler takes them."""
        assert self._logits is not None, "a forward pass was started"
        if self._sampler is None:
            self._sampler = Sampler(self.seqs, self._model.vocab_size)
        sampled = self._sampler.sample(self._logits, self._tokens, words)
        self._logits = None
        mx.async_eval(sampled.arrays())  # type: ignore[no-untyped-call]
        self._tokens = sampled.tokens
        return InFlight(self.seqs, sampled)

    def _forward(self) -> mx.array:
        self._logits = self._model.decode(self.seqs, self._tokens, self._caches)
        if self._counters is None:
            self._counters = layers.length_counters(self._caches)
        layers.set_lengths(self._counters, [seq.num_computed_tokens for seq in self.seqs])
        return self._logits

    def take(self, index: int) -> "Batch":
        """Copy one row into a batch of its own. The row stays in this batch until `keep`."""
        caches = self._caches if len(self.seqs) == 1 else layers.extract(self._caches, index)
        return Batch(self._model, [self.seqs[index]], caches, self._tokens[index : index + 1])

    def keep(self, indices: list[int]) -> None:
        """Keep only the rows at `indices`."""
        if len(indices) == len(self.seqs):
            return
        if len(indices) == 1:
            self._caches = layers.extract(self._caches, indices[0])
        else:
            layers.keep(self._caches, indices)
        self.seqs = [self.seqs[index] for index in indices]
        self._tokens = self._tokens[mx.array(indices)]
        self._sampler = self._counters = None

    def join(self, singles: list["Batch"]) -> None:
        """Add the rows of batches that have one row each."""
        if len(self.seqs) == 1:
            self._caches = layers.merge([self._caches, *(single._caches for single in singles)])
        else:
            layers.extend(self._caches, [single._caches for single in singles])
        self.seqs = [*self.seqs, *(single.seqs[0] for single in singles)]
        self._tokens = mx.concatenate([self._tokens, *(single._tokens for single in singles)])
        self._sampler = self._counters = None
