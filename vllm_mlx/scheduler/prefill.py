"""Plans the prefill of a step: which prompts are computed, and up to where."""

from collections.abc import Sequence as Rows

from ..core.sequence import Sequence, SequenceStatus
from ..core.step import PrefillChunk
from .image_planner import ImagePlanner
from .memory_pool import Room
from .prefill_pacer import PrefillPacer, fixed_chunk_end, plan_prefill
from .prefix_planner import PrefixPlanner
from .turns import Turns


class PrefillPlanner:
    def __init__(
        self,
        pacer: PrefillPacer,
        turns: Turns,
        room: Room,
        prefix_cache: PrefixPlanner | None,
        images: ImagePlanner | None,
        fixed_chunk: int | None,
    ):
        """`fixed_chunk`: tokens of every chunk, if chunks must not depend on other requests."""
        self._pacer = pacer
        self._turns = turns
        self._room = room
        self._prefix_cache = prefix_cache
        self._images = images
        self._fixed_chunk = fixed_chunk

    def plan(self, prefilling: Rows[Sequence], now: float, *, is_decoding: bool) -> tuple[PrefillChunk, ...]:
        """Plan the chunks of one step, and count their tokens as computed."""
        most_s = self._turns.longest_prefill_s(self._pacer.max_stall_s, now)
        budget = self._pacer.budget(decoding=is_decoding, most_s=most_s)
        chunks = plan_prefill(self._turns.in_turn(prefilling), self._pacer, self._chunk, budget)
        if chunks:
            self._turns.prefill(chunks[0].seq)
        return chunks

    def _chunk(self, seq: Sequence, most: int) -> PrefillChunk:
        """Plan the next chunk of a row, up to position `most` or an earlier one. It may be empty."""
        start, cache = seq.num_computed_tokens, self._prefix_cache
        end = self._chunk_end(seq, most)
        seq.num_computed_tokens = end
        if end == seq.prefill_end:
            seq.status = SequenceStatus.DECODING
        capture = cache.plan_chunk_capture(seq, end) if cache is not None and end > start else None
        return PrefillChunk(seq, start, end, capture)

    def _chunk_end(self, seq: Sequence, most: int) -> int:
        if self._fixed_chunk is not None:
            end = fixed_chunk_end(seq, self._pacer.fixed_chunk(self._fixed_chunk, seq.num_computed_tokens))
        else:
            end = min(most, seq.prefill_end if self._prefix_cache is None else self._prefix_cache.next_point(seq))
        if self._images is not None and seq.prompt.media:
            end = self._images.chunk_end(seq, end)
            self._room.shrink_cache()  # the features of an image that is encoded take memory
        return end
