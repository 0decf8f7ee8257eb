"""Divides one step among the groups of rows that decode and the rows that prefill. Knows no memory and no places."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from ..core.sequence import Sequence, SequenceStatus
from ..core.step import PrefillChunk
from .prefill_pacer import MIN_CHUNK, PrefillPacer

Groups = tuple[tuple[Sequence, ...], ...]  # rows that step together


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes, and the groups that skip it."""

    decode: Groups
    resting: Groups
    prefill: tuple[PrefillChunk, ...]


def plan_work(
    groups: Groups,
    favoured: Rows[Sequence],
    plan_prefill: Callable[[Groups, Groups], tuple[PrefillChunk, ...]],
) -> Work:
    """The groups of other tenants rest while favoured rows come nearer to their first token.

    Counts the tokens that the other groups compute. `plan_prefill` takes the decoding and the resting groups.
    """
    resting = tuple(group for group in groups if favoured and _must_rest(group, favoured))
    decode = tuple(group for group in groups if group not in resting)
    _feed(decode)
    prefill = plan_prefill(decode, resting)
    if not resting or _serves(favoured, prefill):
        return Work(decode, resting, prefill)
    _feed(resting)
    return Work(groups, (), prefill)


def _must_rest(group: Rows[Sequence], favoured: Rows[Sequence]) -> bool:
    """A group yields if it has rows of tenants without a favoured row, and no favoured row itself."""
    tenants = {row.tenant for row in favoured}
    return any(row.tenant not in tenants for row in group) and not any(row in favoured for row in group)


def _feed(groups: Groups) -> None:
    for group in groups:
        for row in group:
            row.num_computed_tokens += 1


def _serves(favoured: Rows[Sequence], prefill: Rows[PrefillChunk]) -> bool:
    """Whether a favoured row comes nearer to its first token: by a chunk, or because the token is in flight."""
    prefilling = {chunk.seq.seq_id for chunk in prefill}
    return any(row.num_in_flight or row.seq_id in prefilling for row in favoured)


def plan_prefill(
    queue: Rows[Sequence],
    pacer: PrefillPacer,
    chunk: Callable[[Sequence, int], PrefillChunk],
    budget_s: float,
) -> tuple[PrefillChunk, ...]:
    """The first prompt gets at least half of `budget_s`; prompts that fit in what is left ride along whole.

    `chunk`: plans at most so many tokens of a row, which may be none.
    """
    if not queue:
        return ()
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
