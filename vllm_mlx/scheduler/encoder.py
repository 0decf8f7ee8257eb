"""Plans the work of an encoder, which reads texts and generates nothing. It is pure: no mlx, no clock, no text.

The unit of work is one batch of whole texts, padded to the longest one. All requests run as soon as they come. A unit
begins with the longest text of the request whose turn it is: tenants take turns, and so do the requests of each. Then
come the texts of all requests that are nearest in length, as far as time, memory and padding allow.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heapreplace
from typing import Any

from ..core.config import EngineConfig
from ..core.events import FinishReason
from ..core.memory import AttentionCost, MemoryBudget, RowFootprint
from ..core.sequence import Sequence, SequenceStatus
from ..core.step import PrefillChunk, SequenceUpdate, StepOutput, StepPlan
from .prefill_pacer import PrefillPacer
from .scheduler import Scheduler, update_of

_MOST_PADDED = 1.15  # tokens of a unit over those of its texts, unless a separate unit would cost more
_MOST_ROWS = 256  # of a unit, so that its plan stays small; no Mac has verified it
NO_STATE = RowFootprint(bytes_per_token=0)  # an encoder keeps nothing of a text


class OpenTexts:
    """A request whose texts are read, and the vectors or scores that are known."""

    def __init__(self, seq: Sequence):
        assert seq.prompt.texts is not None, "other requests are refused"
        self.seq, self.tokenized = seq, seq.prompt.texts
        self.found: dict[int, Any] = {}  # by keys that rise with the texts

    def vectors(self, num_texts: int) -> list[Any]:
        """Return the results of so many texts in their order; none until all are known."""
        return [self.found[key] for key in sorted(self.found)] if len(self.found) == num_texts else []


class _UnitTexts(OpenTexts):
    def __init__(self, seq: Sequence):
        super().__init__(seq)
        self.turn = 0
        self.left = sorted((end - start, start) for start, end in self.tokenized.spans)  # the longest last


class EncoderScheduler(Scheduler):
    """Plans units, and collects the vectors of each sequence until all are known."""

    def __init__(self, config: EngineConfig, *, memory: MemoryBudget, pacer: PrefillPacer, attention: AttentionCost):
        """`attention`: the memory of a row's scores and mask. The pacer bounds the tokens of a unit, padded."""
        super().__init__(config, memory=memory, footprint=NO_STATE, pacer=pacer)
        self._attention = attention
        self._open: dict[int, _UnitTexts] = {}  # by seq_id
        self._planned: list[PrefillChunk] = []  # of the last unit
        self._num_turns = 0

    def schedule(self, now: float = 0.0, *, is_alone: bool = True, looks_ahead: bool = True) -> StepPlan:
        """Plan the next unit. The arguments are those of a scheduler that generates."""
        for chunk in self._planned:  # a fault has lost its vector, or has ended its sequence
            texts = self._open.get(chunk.seq.seq_id)
            if texts is not None and chunk.start not in texts.found:
                insort(texts.left, (chunk.end - chunk.start, chunk.start))
        for seq in list(self._seqs.waiting):
            self._start_texts(seq, now)
        self._planned = list(self._unit(now))
        return StepPlan(prefill=tuple(self._planned))

    def update(self, output: StepOutput) -> list[SequenceUpdate]:
        """Take in the vectors of a unit. A sequence ends with the vector of its last text."""
        changed = []
        for encoded in output.encoded:
            texts = self._open[encoded.seq_id]
            texts.found[encoded.start] = encoded.vector
            texts.seq.num_computed_tokens += encoded.num_tokens
            changed.append(texts)
        updates = super().update(output)
        for texts in dict.fromkeys(changed):
            if vectors := texts.vectors(len(texts.tokenized.ends)):
                self._finish(texts.seq, FinishReason.STOP)
            updates.append(replace(update_of(texts.seq), vectors=vectors, num_encoded=len(texts.found)))
        return updates

    def _start_texts(self, seq: Sequence, now: float) -> None:
        """Let a sequence run. One that a fault has stopped keeps the vectors that are known."""
        self._seqs.admit(seq)
        if seq.scheduled_s is None:
            seq.scheduled_s = now
            self._pending.admitted.append(seq)
        seq.status = SequenceStatus.PREFILLING
        texts = self._open.setdefault(seq.seq_id, _UnitTexts(seq))
        seq.num_computed_tokens = seq.num_prompt_tokens - sum(length for length, _ in texts.left)

    def _unit(self, now: float) -> Iterator[PrefillChunk]:
        """Take the texts of the next unit out of those that are left."""
        self.prefill.is_prefilling = bool(self._open)
        longest_s = self.turns.longest_prefill_s(self._pacer.max_stall_s, now)
        if not self._open or not self.prefill.beside_s:
            return
        rows = sorted(self._open.values(), key=lambda texts: texts.turn)
        first = self._open[self.turns.in_turn(texts.seq for texts in rows)[0].seq_id]
        self._num_turns += 1
        first.turn = self._num_turns
        self.turns.prefill(first.seq)
        if self._groups.is_isolated(first.seq.seq_id):
            rows = [first]
        rows = [each for each in rows if each is first or not self._groups.is_isolated(each.seq.seq_id)]
        seconds = min(self.prefill.beside_s, longest_s, self._pacer.max_stall_s)
        yield from self._nearest(first, rows, self._most_rows(first.left[-1][0], seconds))

    def _most_rows(self, longest: int, seconds: float) -> int:
        """Return the rows of a unit whose longest text has `longest` tokens: at least one."""
        by_time = self._pacer.chunk_tokens(seconds, longest) // longest
        by_memory = min(self._pacer.longest_chunk // longest, self._attention.most_rows(longest))
        return max(1, min(by_time, by_memory, _MOST_ROWS))

    def _nearest(self, first: _UnitTexts, rows: list[_UnitTexts], most: int) -> Iterator[PrefillChunk]:
        """Take the longest text of `first`, and then those of all rows that are nearest to it and not longer."""
        longest, num_tokens = first.left[-1][0], 0
        ends = [bisect_right(texts.left, (longest, math.inf)) for texts in rows]
        nearest = [
            (-texts.left[end - 1][0], texts is not first, at)
            for at, (texts, end) in enumerate(zip(rows, ends, strict=True))
            if end
        ]
        heapify(nearest)
        for num_rows in range(most):
            if not nearest:
                return
            length, at = -nearest[0][0], nearest[0][2]
            is_padded = (num_rows + 1) * longest > _MOST_PADDED * (num_tokens + length)
            if is_padded and self._pacer.chunk_s(longest - length) > 2 * self._pacer.chunk_s(0):
                return
            ends[at] -= 1
            _, start = rows[at].left.pop(ends[at])
            num_tokens += length
            yield PrefillChunk(rows[at].seq, start, start + length)
            if ends[at]:
                heapreplace(nearest, (-rows[at].left[ends[at] - 1][0], rows[at] is not first, at))
            else:
                heappop(nearest)

    def _finish(self, seq: Sequence, reason: FinishReason, *, keep: bool = True) -> None:
        self._open.pop(seq.seq_id, None)
        super()._finish(seq, reason, keep=keep)

    def _leave(self, seq: Sequence, num_computed_tokens: int, *, keep: bool = True) -> None:
        """Do nothing: the runner keeps nothing of a sequence."""
