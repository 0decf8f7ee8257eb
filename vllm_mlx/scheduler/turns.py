"""Decides whose turn it is when several tenants want places, memory and time. One tenant alone is served in order.

A tenant that has fewer rows comes first, then the one that had less engine time while others were here. A tenant that
waits for the first token of a reply gets at least its share of engine time until then; decoding of the others gets the
rest. All shares are in proportion to the priorities of the tenants.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from ..core.sequence import Sequence
from ..core.step import PrefillChunk, StepOutput

_RECENT_S = 60.0  # a tenant that was here within this time may come again at any moment
_LEAST_PREFILL_SHARE = 0.25  # share of a stall; shorter chunks would cost too much
Groups = tuple[tuple[Sequence, ...], ...]  # rows that step together


@dataclass(frozen=True, slots=True)
class _Mark:
    """Engine time in seconds, at the moment when a tenant began to wait for a first token."""

    own_s: float  # over the tenant's priority
    all_s: float


class Turns:
    def __init__(self, row_bytes: Callable[[Sequence], int]):
        """`row_bytes`: what a row takes at its present length."""
        self._row_bytes = row_bytes
        self._num_here: Counter[str] = Counter()  # sequences that wait or run, by tenant
        self._priorities: dict[str, int] = {}  # by tenant
        self._served: dict[str, float] = {}  # seconds of engine time over priority, by which tenants are compared
        self._all_s = 0.0  # engine time of all tenants
        self._marks: dict[str, _Mark] = {}  # by tenant that waits for a first token
        self._start_s: dict[str, float] = {}  # engine time that a tenant's last first token took beside others
        self._seen_s: dict[str, float] = {}  # when a tenant was here last, by the scheduler's clock

    @property
    def are_taken(self) -> bool:
        """Whether there is more than one tenant."""
        return len(self._num_here) > 1

    def join(self, seq: Sequence) -> None:
        """A tenant that comes back, or is new, has no credit for the time in which it asked for nothing."""
        tenant = seq.tenant
        self._priorities[tenant] = seq.priority
        if tenant not in self._num_here:
            least = min((self._served[other] for other in self._num_here), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), least)
        self._num_here[tenant] += 1

    def leave(self, seq: Sequence) -> None:
        """It has ended."""
        self._num_here[seq.tenant] -= 1
        if not self._num_here[seq.tenant]:
            del self._num_here[seq.tenant]
        if not self._num_here:
            self._served.clear()

    def charge(self, output: StepOutput, seqs: Mapping[int, Sequence]) -> None:
        """Decoding is paid by the tenants whose tokens were read, prefill by those whose chunks ran."""
        if not self.are_taken:
            return
        rows = [seqs[token.seq_id] for token in output.tokens if token.seq_id in seqs]
        for row in rows:
            self._pay(row.tenant, output.busy_s / len(rows))
        for (seq_id, _), timing in zip(output.prefilled, output.chunk_timings, strict=True):
            if seq_id in seqs:
                self._pay(seqs[seq_id].tenant, timing.seconds)

    def _pay(self, tenant: str, seconds: float) -> None:
        self._served[tenant] += seconds / self._priorities[tenant]
        self._all_s += seconds

    def longest_prefill_s(self, max_stall_s: float) -> float:
        """Seconds that the prefill of one step may take, because a tenant that comes meanwhile waits until its end.

        Not limited while one tenant alone was here recently. Otherwise as long as the quickest recent first token
        took, between a part of `max_stall_s` and all of it.
        """
        if len(self._seen_s) < 2:
            return math.inf
        quickest_s = min(
            (self._start_s[tenant] for tenant in self._seen_s if tenant in self._start_s), default=math.inf
        )
        return min(max_stall_s, max(_LEAST_PREFILL_SHARE * max_stall_s, quickest_s))

    def favoured(self, rows: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Rows without a first token whose tenant, since it has such rows, had no more than its share of engine time.

        Called once a step, with the time by the scheduler's clock.
        """
        self._see(now_s)
        starting = [row for row in rows if not row.output_token_ids] if self.are_taken else []
        now = {row.tenant: _Mark(self._served[row.tenant], self._all_s) for row in starting}
        for tenant in self._marks.keys() - now.keys():
            own_s = self._served.get(tenant, 0.0) - self._marks[tenant].own_s
            self._start_s[tenant] = own_s * self._priorities[tenant]
        self._marks = {tenant: self._marks.get(tenant, mark) for tenant, mark in now.items()}
        behind = {tenant for tenant, mark in self._marks.items() if self._is_behind(now[tenant], mark)}
        return [row for row in starting if row.tenant in behind]

    def _see(self, now_s: float) -> None:
        self._seen_s |= dict.fromkeys(self._num_here, now_s)
        if len(self._seen_s) > len(self._num_here):
            self._seen_s = {tenant: seen_s for tenant, seen_s in self._seen_s.items() if now_s - seen_s <= _RECENT_S}

    def _is_behind(self, now: _Mark, since: _Mark) -> bool:
        total = sum(self._priorities[tenant] for tenant in self._num_here)
        return total * (now.own_s - since.own_s) <= now.all_s - since.all_s

    def next(self, waiting: Iterable[Sequence], rows: Iterable[Sequence], but: Collection[int]) -> Sequence | None:
        """The sequence to admit before the others; `but`: ids of the ones that wait for something else."""
        ready = (seq for seq in waiting if seq.seq_id not in but)
        if not self.are_taken:
            return next(ready, None)
        num_rows = self._held(rows, lambda row: 1)
        first: dict[str, Sequence] = {}
        for seq in ready:
            first.setdefault(seq.tenant, seq)
        return min(first.values(), key=lambda seq: (num_rows[seq.tenant], self._served[seq.tenant]), default=None)

    def in_turn(self, rows: list[Sequence], favoured: Collection[Sequence]) -> list[Sequence]:
        """Rows that prefill, in the order in which they are computed."""
        if not self.are_taken:
            return rows
        return sorted(rows, key=lambda row: (row not in favoured, self._served[row.tenant]))

    def rows_above(
        self,
        seq: Sequence,
        rows: Rows[Sequence],
        *,
        coming_bytes: int,
        lacking_places: int,
        lacking_bytes: int,
        is_crowded: bool,
        num_running: int,
    ) -> list[Sequence] | None:
        """The rows to preempt for `seq`, of tenants that have more of what is lacking. None if they are not enough.

        A crowded pool admits nobody but a tenant that has less than another: should memory be short again, rows of
        the other one are preempted first. `num_running` counts the rows that may not be preempted too.
        """
        staying, leaving = list(rows), list[Sequence]()
        while len(leaving) < num_running and (lacking_places > 0 or lacking_bytes > 0 or is_crowded):
            row = self._row_above(seq, staying, coming_bytes=coming_bytes, lacks_place=lacking_places > 0)
            if row is None:
                return None
            if lacking_places <= 0 and lacking_bytes <= 0:
                break
            staying.remove(row)
            leaving.append(row)
            lacking_places -= 1
            lacking_bytes -= self._row_bytes(row)
        return leaving

    def _row_above(
        self, seq: Sequence, rows: Rows[Sequence], *, coming_bytes: int, lacks_place: bool
    ) -> Sequence | None:
        """The row to preempt for `seq`: the youngest of the tenant that has most of what is lacking.

        None unless that tenant has more than the sequence's own would have with it: places, or bytes.
        """
        if not self.are_taken:
            return None
        held = self._held(rows, (lambda row: 1) if lacks_place else self._row_bytes)
        tenant = max(held, key=held.__getitem__, default=seq.tenant)
        coming = (1 if lacks_place else coming_bytes) / seq.priority
        return None if held[tenant] <= held[seq.tenant] + coming else _youngest(rows, tenant)

    def row_to_preempt(self, rows: Rows[Sequence]) -> Sequence:
        """The row that goes when memory is short: the youngest of the tenant that has most of it."""
        if not self.are_taken:
            return rows[-1]
        held = self._held(rows, self._row_bytes)
        return _youngest(rows, max(held, key=held.__getitem__))

    def _held(self, rows: Iterable[Sequence], amount: Callable[[Sequence], int]) -> defaultdict[str, float]:
        """What each tenant has, over its priority."""
        held: defaultdict[str, float] = defaultdict(float)
        for row in rows:
            held[row.tenant] += amount(row) / row.priority
        return held


def _youngest(rows: Rows[Sequence], tenant: str) -> Sequence:
    return next(row for row in reversed(rows) if row.tenant == tenant)


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
