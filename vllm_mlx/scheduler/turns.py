"""Whose turn it is where several tenants want places, memory and time. With one tenant, arrival decides alone.

A tenant that has fewer rows comes first, then the one for which fewer tokens were computed while others were here.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Rows

from ..core.sequence import Sequence


class Turns:
    def __init__(self, row_bytes: Callable[[Sequence], int]):
        """`row_bytes`: what a row takes at its present length."""
        self._row_bytes = row_bytes
        self._num_here: Counter[str] = Counter()  # sequences that wait or run, by tenant
        self._served: dict[str, int] = {}  # tokens computed for a tenant, by which it is compared with others

    @property
    def are_taken(self) -> bool:
        """Whether there is more than one tenant."""
        return len(self._num_here) > 1

    def join(self, seq: Sequence) -> None:
        """A tenant that comes back, or is new, has no credit for the time in which it asked for nothing."""
        tenant = seq.tenant
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

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """Tokens are computed for it in this step."""
        if self.are_taken:
            self._served[seq.tenant] += num_tokens

    def next(self, waiting: Iterable[Sequence], rows: Iterable[Sequence], but: Collection[int]) -> Sequence | None:
        """The sequence to admit before the others; `but`: ids of those that wait for something else."""
        ready = (seq for seq in waiting if seq.seq_id not in but)
        if not self.are_taken:
            return next(ready, None)
        num_rows = Counter(row.tenant for row in rows)
        first: dict[str, Sequence] = {}
        for seq in ready:
            first.setdefault(seq.tenant, seq)
        return min(first.values(), key=lambda seq: (num_rows[seq.tenant], self._served[seq.tenant]), default=None)

    def in_turn(self, rows: list[Sequence]) -> list[Sequence]:
        """Rows that prefill, in the order in which they are computed."""
        return sorted(rows, key=lambda row: self._served[row.tenant]) if self.are_taken else rows

    def row_above(
        self, seq: Sequence, rows: Rows[Sequence], *, coming_bytes: int, lacks_place: bool
    ) -> Sequence | None:
        """The row to preempt for `seq`: the youngest of the tenant that has most of what is lacking.

        None unless that tenant has more than the sequence's own would have with it: places, or bytes.
        """
        if not self.are_taken:
            return None
        held: Counter[str] = Counter()
        for row in rows:
            held[row.tenant] += 1 if lacks_place else self._row_bytes(row)
        [(tenant, most)] = held.most_common(1) or [(seq.tenant, 0)]
        if most <= held[seq.tenant] + (1 if lacks_place else coming_bytes):
            return None
        return _youngest(rows, tenant)

    def row_to_preempt(self, rows: Rows[Sequence]) -> Sequence:
        """The row that goes when memory is short: the youngest of the tenant that has most of it."""
        if not self.are_taken:
            return rows[-1]
        held: Counter[str] = Counter()
        for row in rows:
            held[row.tenant] += self._row_bytes(row)
        return _youngest(rows, max(held, key=held.__getitem__))


def _youngest(rows: Rows[Sequence], tenant: str) -> Sequence:
    return next(row for row in reversed(rows) if row.tenant == tenant)
