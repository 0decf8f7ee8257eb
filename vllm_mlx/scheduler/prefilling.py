"""Divides the prefill time of one step among the rows that prefill. Knows no memory and no places."""

from collections.abc import Callable
from collections.abc import Sequence as Rows

from ..core.sequence import Sequence, SequenceStatus
from ..core.step import PrefillChunk
from .pacing import MIN_CHUNK, PrefillPacer


def plan_prefill(
    queue: Rows[Sequence],
    pacer: PrefillPacer,
    chunk: Callable[[Sequence, int], PrefillChunk],
    *,
    decoding: bool,
) -> tuple[PrefillChunk, ...]:
    """The first prompt gets at least half of the step; prompts that fit in what is left ride along whole.

    `chunk`: plans at most so many tokens of a row, which may be none.
    """
    if not queue:
        return ()
    budget_s = pacer.step_budget_s(decoding=decoding)
    riders, spent_s = [], 0.0
    for seq in queue[1:]:
        start = seq.num_computed_tokens
        num_left = seq.prefill_end - start
        cost_s = pacer.chunk_s(num_left, start)
        if num_left <= pacer.chunk_tokens(budget_s, start) and spent_s + cost_s <= budget_s / 2:
            riders.append((seq, num_left))
            spent_s += cost_s
    head = chunk(queue[0], pacer.chunk_tokens(budget_s - spent_s, queue[0].num_computed_tokens))
    chunks = [head, *(chunk(seq, num_tokens) for seq, num_tokens in riders)]
    spent_s += pacer.chunk_s(head.end - head.start, head.start)
    rest = [seq for seq in queue[1:] if seq.status is SequenceStatus.PREFILLING]
    for seq in rest:  # the head took less than its share
        start = seq.num_computed_tokens
        if spent_s + pacer.chunk_s(MIN_CHUNK, start) > budget_s:
            break
        planned = chunk(seq, pacer.chunk_tokens(budget_s - spent_s, start))
        spent_s += pacer.chunk_s(planned.end - planned.start, planned.start)
        chunks.append(planned)
    return tuple(planned for planned in chunks if planned.end > planned.start)
