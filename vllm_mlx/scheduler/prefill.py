"""Plans the prefill of a step: which prompts are computed, and up to where."""

import math
from collections.abc import Sequence as Rows

from ..core.config import EngineConfig
from ..core.sequence import Sequence, SequenceStatus
from ..core.step import MOST_SCORED, PrefillChunk
from .ahead import MAX_CHUNK_S
from .memory_pool import Room
from .prefill_pacer import GRID, Budget, PrefillPacer
from .turns import Turns

_FIXED_CHUNK = 256  # tokens; long enough for full speed, short enough for the GPU's watchdog; not measured on a Mac


class PrefillPlanner:
    def __init__(self, config: EngineConfig, pacer: PrefillPacer, turns: Turns, room: Room):
        self._pacer, self._turns, self._room = pacer, turns, room
        self._prefix_cache, self._images = room.prefix_cache, room.images
        self.beside_s = math.inf  # what other models leave of a step while they are busy; with 0, there is no prefill
        self.is_prefilling = self.is_decoding = False  # in the last step, or ready to decode after it
        # tokens of every chunk, if chunks must not depend on other requests
        self._fixed_chunk = min(_FIXED_CHUNK, config.max_prefill_chunk) if config.repeatable else None

    @property
    def stall_s(self) -> float:
        return self._pacer.max_stall_s

    @property
    def decode_s(self) -> float:
        """Return the seconds of a step of the decoding rows; 0 if none did in the last step."""
        return self._pacer.decode_s if self.is_decoding else 0.0

    def plan(self, prefilling: Rows[Sequence], now: float, *, is_decoding: bool) -> tuple[PrefillChunk, ...]:
        """Plan the chunks of one step, and count their tokens as computed."""
        self.is_prefilling, self.is_decoding = bool(prefilling), is_decoding
        longest_s = self._turns.longest_prefill_s(self._pacer.max_stall_s, now)
        if not prefilling or not self.beside_s:
            return ()
        if prefilling[0].is_ahead:  # then it is alone
            longest_s = min(longest_s, MAX_CHUNK_S)
        most_s, is_alone = min(self.beside_s, longest_s), self._turns.num_here.total() == 1
        budget = self._pacer.budget(decoding=is_decoding, most_s=most_s, is_alone=is_alone)
        chunks = self._chunks(self._turns.in_turn(prefilling), budget)
        if chunks:
            self._turns.prefill(chunks[0].seq)
        self.is_decoding |= any(chunk.seq.status is SequenceStatus.DECODING for chunk in chunks)
        return chunks

    def _chunks(self, queue: Rows[Sequence], budget: Budget) -> tuple[PrefillChunk, ...]:
        """Give the first prompt at least half of the budget. Prompts that fit into the rest run completely."""
        pacer, riders, spent_s, at = self._pacer, [], 0.0, queue[0].num_computed_tokens
        head_s = pacer.chunk_s(pacer.shortest_chunk(budget.seconds, at), at)
        for seq in queue[1:]:
            start = seq.num_computed_tokens
            num_left = seq.prefill_end - start
            cost_s = pacer.chunk_s(num_left, start)
            most_s = min(budget.seconds / 2, budget.seconds - head_s)
            if num_left <= pacer.chunk_tokens(budget.seconds, start) and spent_s + cost_s <= most_s:
                riders.append(seq)
                spent_s += cost_s
        head_budget = Budget(budget.seconds - spent_s) if riders else budget
        head = self._chunk(queue[0], pacer.chunk_end(at, head_budget, queue[0].prefill_end - at))
        chunks = [head, *(self._chunk(seq, seq.prefill_end) for seq in riders)]
        spent_s += pacer.chunk_s(head.end - head.start, head.start)
        rest = [seq for seq in queue[1:] if seq.status is SequenceStatus.PREFILLING]
        for seq in rest:  # the head took less than its share
            start = seq.num_computed_tokens
            if spent_s + pacer.chunk_s(GRID, start) > budget.seconds:
                break
            planned = self._chunk(seq, pacer.chunk_end(start, Budget(budget.seconds - spent_s)))
            spent_s += pacer.chunk_s(planned.end - planned.start, planned.start)
            chunks.append(planned)
        return tuple(planned for planned in chunks if planned.end > planned.start)

    def _chunk(self, seq: Sequence, most: int) -> PrefillChunk:
        """Plan the next chunk of a row, up to position `most` or an earlier one. It may be empty."""
        start, cache = seq.num_computed_tokens, self._prefix_cache
        end = self._chunk_end(seq, most)
        seq.num_computed_tokens = end
        if end == seq.prefill_end:
            seq.status = SequenceStatus.DECODING
        capture = cache.plan_chunk_capture(seq, end) if cache is not None and end > start else None
        return PrefillChunk(seq, start, end, capture, scores=not seq.is_scored)

    def _chunk_end(self, seq: Sequence, most: int) -> int:
        if self._pacer.whole_prompts:
            end = _fixed_end(seq, seq.num_prompt_tokens)
        elif self._fixed_chunk is not None:
            end = _fixed_end(seq, self._pacer.fixed_chunk(self._fixed_chunk, seq.num_computed_tokens))
        else:
            end = min(most, seq.prefill_end if self._prefix_cache is None else self._prefix_cache.next_point(seq))
        if not (seq.is_scored or self._pacer.whole_prompts):
            start, num_tokens = seq.num_computed_tokens, min(end - seq.num_computed_tokens, MOST_SCORED)
            end = start + (self._pacer.scored_tokens(num_tokens, start) if self.is_decoding else num_tokens)
        if self._images is not None and seq.prompt.media:
            end = self._images.chunk_end(seq, end)
            self._room.shrink_cache()  # the features of an image that is encoded take memory
        return end


def _fixed_end(seq: Sequence, num_tokens: int) -> int:
    """Return the end of the next chunk if chunks depend on the sequence alone, so that every run rounds alike.

    Chunks of a prompt end at multiples of `num_tokens` and before an image. A preempted row computes the tokens of its
    reply one at a time, as it did before.
    """
    start = seq.num_computed_tokens
    prompt_end = seq.num_prompt_tokens - 1  # the last token of the prompt was fed by a decode step
    if start >= prompt_end:
        return min(start + 1, seq.prefill_end)
    images = (item.offset for item in seq.prompt.media if item.offset > start)
    return min(prompt_end, start - start % num_tokens + num_tokens, *images)
