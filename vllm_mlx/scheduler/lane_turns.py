"""Decides which model runs the next step. It is pure: seconds are passed in."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

_HEAD_START_S = 0.2  # for which a lane that becomes busy goes before the others, so that short requests are quick


class LaneTurns:
    """Owns the seconds that each lane was served. Lanes are named by their positions.

    Of two busy lanes with equal tenants, each gets half of the time. A tenant counts in each of its lanes for a part,
    so that it gets no more by using several models.
    """

    def __init__(self, num_lanes: int):
        self._served_s = defaultdict(float, dict.fromkeys(range(num_lanes), 0.0))  # more lanes may come
        self._busy: set[int] = set()

    def next(self, busy: Collection[int]) -> int:
        """Return the lane that was served least. One that has just become busy has missed no more than a head start."""
        coming = set(busy) - self._busy
        if coming == set(busy):  # no lane has waited for another
            self._served_s.clear()
        elif coming:
            least_s = min(self._served_s[lane] for lane in busy if lane not in coming) - _HEAD_START_S
            for lane in coming:  # one that has used its head start lately gets no other one
                self._served_s[lane] = max(self._served_s[lane], least_s)
        self._busy = set(busy)
        return min(busy, key=self._served_s.__getitem__)

    def charge(self, lane: int, seconds: float, tenants: Mapping[int, Collection[str]]) -> None:
        """Note the time that a lane was served. `tenants`: those of each busy lane."""
        num_lanes = Counter(tenant for there in tenants.values() for tenant in set(there))
        weight = sum(1 / num_lanes[tenant] for tenant in set(tenants.get(lane, ())))
        self._served_s[lane] += seconds / (weight or 1.0)
