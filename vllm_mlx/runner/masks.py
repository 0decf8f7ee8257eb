"""Masks of a batch: what its constrained rows may draw next, as bits, and the logits of all else taken out."""

import logging
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance.mlx import apply_token_bitmask

from ..core.errors import GenerationError
from ..core.sequence import Sequence
from ..core.step import TokenOutput
from .grammar_time import Clock, Grace, thread_time
from .row_constraint import RowConstraint

logger = logging.getLogger(__name__)

Words = np.ndarray[Any, np.dtype[np.uint32]]  # (rows, words) of 32 tokens each
_ALL = np.uint32(0xFFFFFFFF)


class Masks:
    """The constrained rows of all batches, by sequence id."""

    def __init__(self, clock: Clock = thread_time) -> None:
        """`clock` measures what grammars take."""
        self._clock = clock
        self._rows: dict[int, RowConstraint] = {}
        self._graces: dict[str, Grace] = {}  # by tenant, which are as many as there are API keys
        self._failed: list[tuple[int, GenerationError]] = []

    def has_any(self, seqs: Iterable[Sequence]) -> bool:
        return bool(self._rows) and any(seq.seq_id in self._rows for seq in seqs)

    def start(self, seq: Sequence) -> None:
        """What the row has written so far is taken in."""
        if seq.constraint is None:
            return
        try:
            grace = self._graces.setdefault(seq.tenant, Grace())
            self._rows[seq.seq_id] = RowConstraint(seq.constraint, seq, self._clock, grace)
        except Exception as error:  # a fence: any error concerns this row alone
            self._fail(seq.seq_id, error)

    def drop(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)

    def clear(self) -> None:
        self._rows.clear()
        self._failed.clear()

    def feed(self, tokens: Iterable[TokenOutput]) -> None:
        if not self._rows:
            return
        for token in tokens:
            row = self._rows.get(token.seq_id)
            if row is None:
                continue
            try:
                row.feed(token.token_id)
            except Exception as error:  # a fence: any error concerns this row alone
                self._fail(token.seq_id, error)

    def take_failed(self) -> list[tuple[int, GenerationError]]:
        """Rows that could not go on since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def words(self, seqs: list[Sequence]) -> Words | None:
        """For a batch of these rows what each may draw next; None: every row is free."""
        bound = {row: held for row, seq in enumerate(seqs) if (held := self._rows.get(seq.seq_id)) and held.is_bounding}
        if not bound:
            return None
        num_words = max(held.num_words for held in bound.values())
        words = np.full((len(seqs), num_words), _ALL, dtype=np.uint32)
        for row, held in bound.items():
            try:
                held.fill(words[row])
            except Exception as error:  # a fence: any error concerns this row alone
                self._fail(seqs[row].seq_id, error)
                words[row] = _ALL
        return words

    def _fail(self, seq_id: int, error: Exception) -> None:
        if not isinstance(error, GenerationError):
            logger.error("A guided reply failed", exc_info=error)
            error = GenerationError(f"The reply cannot be guided any further: {type(error).__name__}: {error}")
        self._failed.append((seq_id, error))
        self.drop(seq_id)


def apply_mask(logits: mx.array, words: Words) -> mx.array:
    """`logits: (rows, vocab)`: minus infinity where the bit is 0. llguidance's kernel is for Metal alone."""
    if mx.metal.is_available():
        masked: mx.array = apply_token_bitmask(logits, words.view(np.int32))
        return masked
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    return mx.where(mx.array(allowed.view(np.bool_)), logits, -mx.inf)
