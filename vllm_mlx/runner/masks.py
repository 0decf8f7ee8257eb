"""The token masks of a batch: one bit per token says whether a constrained row may sample it next."""

import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance.mlx import apply_token_bitmask

from ..core.errors import GenerationError, GrammarLimit
from ..core.sequence import Constraint, Sequence
from ..core.step import TokenOutput
from ..util.fence import Fence, RowFence
from .row_constraint import Clock, Filled, RowConstraint, thread_time

logger = logging.getLogger(__name__)

Words = np.ndarray[Any, np.dtype[np.uint32]]  # (rows, words), 32 tokens per word
_ALL = np.uint32(0xFFFFFFFF)


class Masks:
    """The constrained rows of all batches, by sequence id."""

    def __init__(self, clock: Clock = thread_time) -> None:
        """`clock` measures the time that grammars take."""
        self._clock = clock
        self._rows: dict[int, RowConstraint] = {}
        self._failed: list[tuple[int, GenerationError]] = []

    def has_any(self, seqs: Iterable[Sequence]) -> bool:
        return bool(self._rows) and any(seq.seq_id in self._rows for seq in seqs)

    def bind(self, seqs: Iterable[Sequence]) -> bool:
        """Return whether a mask restricts the next token of a row."""
        rows = (self._rows.get(seq.seq_id) for seq in seqs) if self._rows else ()
        return any(row is not None and row.is_bounding for row in rows)

    def start(self, seq: Sequence) -> None:
        """Constrain a row, which may have sampled tokens already."""
        if seq.constraint is None:
            return
        with self._fence(seq.seq_id, seq.constraint):
            self._rows[seq.seq_id] = RowConstraint(seq.constraint, seq, self._clock)

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
            with self._fence(token.seq_id, row.constraint):
                row.feed(token.token_id)

    def take_failed(self) -> list[tuple[int, GenerationError]]:
        """Return the rows that have failed since the last call, with their errors."""
        failed, self._failed = self._failed, []
        return failed

    def words(self, seqs: list[Sequence]) -> Words | None:
        """Return the mask of each row of a batch. None if every row may sample any token."""
        return self.block_words(seqs, [(0,)] * len(seqs))[0]

    def block_words(self, seqs: Rows[Sequence], blocks: Rows[Rows[int]]) -> tuple[Words | None, list[Filled | None]]:
        """Return the masks behind each token of the rows' blocks, row after row, if the drafts in them are the reply.

        Also returns the masked places of each row, for `keep`; None for a row that no mask restricts at first.
        """
        bound = [row if row is not None and row.is_bounding else None for row in map(self._row, seqs)]
        if not any(bound):
            return None, [None] * len(seqs)
        num_words = max(row.num_words for row in bound if row is not None)
        words = np.full((sum(map(len, blocks)), num_words), _ALL, dtype=np.uint32)
        all_filled: list[Filled | None] = []
        start = 0
        for seq, row, (_, *drafts) in zip(seqs, bound, blocks, strict=True):
            own = words[start : start + 1 + len(drafts)]
            filled = None
            if row is not None:
                with self._fence(seq.seq_id, row.constraint) as fence:
                    filled = row.fill_block(own, drafts)
                if fence.error is not None:
                    own[:] = _ALL
            all_filled.append(filled)
            start += len(own)
        return words, all_filled

    def keep(self, seq: Sequence, filled: Filled | None, place: int, token_id: int) -> bool:
        """Feed the token that was drawn at a place of a row's block. Returns whether the next place was masked right.

        `filled` is that of `block_words`.
        """
        row = self._row(seq)
        if row is None:
            return True
        with self._fence(seq.seq_id, row.constraint):
            row.feed(token_id)
        return row.has_masked(filled, place + 1)

    def forced(self, seqs: Iterable[Sequence]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the rows whose grammar leaves one choice for the next tokens, with these tokens."""
        found = []
        for seq in seqs if self._rows else ():
            row = self._row(seq)
            if row is not None and row.is_bounding:
                with self._fence(seq.seq_id, row.constraint):
                    if tokens := row.forced():
                        found.append((seq.seq_id, tokens))
        return tuple(found)

    def _row(self, seq: Sequence) -> RowConstraint | None:
        return self._rows.get(seq.seq_id)

    @contextmanager
    def _fence(self, seq_id: int, constraint: Constraint) -> Iterator[Fence]:
        with RowFence("all rows but this guided one", is_logged=False) as fence:
            yield fence
        if fence.error is not None:
            self._fail(seq_id, fence.error)
            if isinstance(fence.error, GrammarLimit) and constraint.refuse is not None:
                constraint.refuse()

    def _fail(self, seq_id: int, error: Exception) -> None:
        if not isinstance(error, GenerationError):
            logger.error("A guided reply failed", exc_info=error)
            error = GenerationError("The reply cannot be guided any further, because of an error in the server.")
        self._failed.append((seq_id, error))
        self.drop(seq_id)


def apply_mask(logits: mx.array, words: Words) -> mx.array:
    """Set `logits: (rows, vocab)` to minus infinity where the bit is 0. llguidance's own kernel runs on Metal only."""
    if mx.metal.is_available():
        masked: mx.array = apply_token_bitmask(logits, words.view(np.int32))
        return masked
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    return mx.where(mx.array(allowed.view(np.bool_)), logits, -mx.inf)
