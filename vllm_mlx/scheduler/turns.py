"""Decides whose turn it is when several tenants want places, memory and prefill. One tenant alone is served in order.

Tenants take turns at admission and in prefill. If places or memory are short, a tenant that has less than another is
admitted, and replaces the other's youngest row.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Rows

from ..core.sequence import Sequence
from .memory_pool import Room

_RECENT_S = 60.0  # a tenant that was here within this time may come again at any moment
_PREFILL_SHARE = 0.25  # share of a stall limit that prefill may take in a step while another tenant may come


class Turns:
    """Owns the order in which tenants were served last."""

    def __init__(self, room: Room):
        self._room = room
        self.num_here: Counter[str] = Counter()  # sequences that wait or run, by tenant
        self._num_turns = 0
        self._admitted: dict[str, int] = {}  # the number of a tenant's last turn at admission
        self._prefilled: dict[str, int] = {}  # the number of a tenant's last turn in prefill
        self._seen_s: dict[str, float] = {}  # when a tenant was here last, by the scheduler's clock

    @property
    def are_several(self) -> bool:
        """Return whether sequences of more than one tenant wait or run."""
        return len(self.num_here) > 1

    @property
    def tenants(self) -> Collection[str]:
        """Return the tenants whose sequences wait or run."""
        return self.num_here.keys()

    def join(self, seq: Sequence) -> None:
        self.num_here[seq.tenant] += 1

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended, and the turns of its tenant if that has no other."""
        self.num_here[seq.tenant] -= 1
        if not self.num_here[seq.tenant]:
            for turns in (self.num_here, self._admitted, self._prefilled):
                turns.pop(seq.tenant, None)

    def next(self, waiting: Iterable[Sequence], rows: Iterable[Sequence], but: Collection[int]) -> Sequence | None:
        """Return the sequence to admit first: of the tenant with the fewest rows, whose turn was longest ago.

        `but` has the ids of sequences that wait for something else.
        """
        first: dict[str, Sequence] = {}
        for seq in waiting:
            if seq.seq_id not in but:
                first.setdefault(seq.tenant, seq)
        if not first:
            return None
        num_rows = Counter(row.tenant for row in rows)
        return min(first.values(), key=lambda seq: (num_rows[seq.tenant], _turn(self._admitted, seq)))

    def admit(self, seq: Sequence) -> None:
        """Note that a sequence was admitted."""
        self._take(self._admitted, seq)

    def in_turn(self, rows: Iterable[Sequence]) -> list[Sequence]:
        """Rows that prefill, in the order in which they are computed."""
        return sorted(rows, key=lambda row: _turn(self._prefilled, row))

    def prefill(self, seq: Sequence) -> None:
        """Note that a row was the first to prefill in a step."""
        self._take(self._prefilled, seq)

    def _take(self, turns: dict[str, int], seq: Sequence) -> None:
        self._num_turns += 1
        turns[seq.tenant] = self._num_turns

    def longest_prefill_s(self, max_stall_s: float, now_s: float) -> float:
        """Seconds that prefill may take in a step, for the sake of a tenant that may come and wait until its end.

        The limit does not apply while only one tenant was here recently. Called once a step.
        """
        self._seen_s |= dict.fromkeys(self.num_here, now_s)
        if len(self._seen_s) > len(self.num_here):
            self._seen_s = {tenant: seen_s for tenant, seen_s in self._seen_s.items() if now_s - seen_s <= _RECENT_S}
        return math.inf if len(self._seen_s) < 2 else _PREFILL_SHARE * max_stall_s

    def row_above(self, seq: Sequence, rows: Rows[Sequence], coming_share: float) -> Sequence | None:
        """Return the row to preempt for a sequence of `coming_share`: the youngest of the tenant with the most.

        Returns None unless that tenant has more than the sequence's own tenant would have with it.
        """
        held = self._held(rows)
        tenant = max(held, key=held.__getitem__, default=seq.tenant)
        return None if held[tenant] <= held[seq.tenant] + coming_share else _youngest(rows, tenant)

    def row_to_preempt(self, rows: Rows[Sequence], first_beside: float = math.inf) -> Sequence | None:
        """Return the row that goes when memory is short: the youngest of the tenant that has the most.

        The last row stays, unless it came after `first_beside`, the first row of other models.
        """
        if not rows or (len(rows) == 1 and rows[0].seq_id < first_beside):
            return None
        held = self._held(rows)
        return _youngest(rows, max(held, key=held.__getitem__))

    def _held(self, rows: Iterable[Sequence]) -> defaultdict[str, float]:
        """Return the sum of the shares of each tenant's rows: of all places, or of the memory if that is larger."""
        held: defaultdict[str, float] = defaultdict(float)
        for row in rows:
            held[row.tenant] += self._room.share(self._room.bytes_of(row))
        return held


def _turn(turns: dict[str, int], seq: Sequence) -> int:
    return turns.get(seq.tenant, 0)


def _youngest(rows: Rows[Sequence], tenant: str) -> Sequence:
    return next(row for row in reversed(rows) if row.tenant == tenant)
