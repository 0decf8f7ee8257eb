"""Decides how many drafts each row verifies in the next step. It knows neither the model nor where drafts come from.

It keeps the cost of a pass by its tokens, and the acceptance rate at each position of a row's drafts. It takes the
depths with the most expected tokens a second if they win a margin over a plain pass. Otherwise it parks at depth 0.
Probes of other depths, with a back-off while parked, keep both figures up to date.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping
from itertools import pairwise
from statistics import median_low
from typing import TypeVar

Row = TypeVar("Row", bound=Hashable)

# No Mac has verified these constants: tests/scheduler/test_draft_bounds.py tries them on simulated chips.
_MARGIN = 1.03  # tokens a second of the best depth, relative to a plain pass, from which drafts begin
_HOPE = 0.04  # more of the cost for each token a row, beyond the widest pass that was measured
_FIRST_RATE = 0.7  # acceptance rate at the first position of a new row
_POOLED = 2  # drafts at a position, as which the rate of the position before it counts
_FADE, _PARKED_FADE = 0.98, 0.7  # decay of earlier drafts, at each draft and at each probe while parked
_KEPT = 5  # passes of a width whose median is its cost
_NUM_PLAIN = 3  # plain passes in a row: where steps run one ahead, the third is the first that can be measured
_WAITS = 32, 512  # steps from one probe to the next while parked, at first and at most
_REFRESH = 64  # the same while drafting; plain passes follow every second probe
COSTLY = "Drafts cost more than they save on this machine at this load."
WRONG = "Too few drafts of the running replies are accepted."


class _Costs:
    """The cost of a pass by its tokens, for one number of rows, as a multiple of a plain pass."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.widest = num_rows  # tokens of the widest pass that was measured
        self._plain_s: deque[float] = deque(maxlen=_KEPT)
        self._measured: dict[int, deque[float]] = {}  # by tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        if num_tokens == self.num_rows:
            self._plain_s.append(seconds)
        elif num_tokens not in self._measured:
            self._measured[num_tokens] = deque(maxlen=_KEPT)  # kernels are compiled in the first pass of a width
        elif self._plain_s:
            self._measured[num_tokens].append(seconds / median_low(self._plain_s))
            self.widest = max(self.widest, num_tokens)

    def table(self, most: int) -> list[float]:
        """Return the costs by tokens beyond one a row, up to `most` of them and to twice the widest pass.

        Between measured widths they are interpolated; beyond them they are assumed to be small.
        """
        known = {self.num_rows: 1.0} | {at: median_low(costs) for at, costs in self._measured.items() if costs}
        costs = [1.0]
        for low, high in pairwise(sorted(known)):
            step = (known[high] - known[low]) / (high - low)
            costs += [known[low] + step * more for more in range(1, high - low + 1)]
        num_hoped = self.widest if self._plain_s else most
        costs += [costs[-1] * (1 + _HOPE * more / self.num_rows) for more in range(1, num_hoped + 1)]
        return costs[: most + 1]


class _Rates:
    """The acceptance rate at each position of a row's drafts, given that the drafts before it were accepted.

    It leans on the rate of the position before it, all the more the longer ago drafts were seen there.
    """

    def __init__(self, most: int):
        self._accepted, self._seen = [0.0] * most, [0.0] * most

    def learn(self, drafted: int, accepted: int, fade: float) -> None:
        for at, (right, seen) in enumerate(zip(self._accepted, self._seen, strict=True)):
            self._accepted[at] = fade * right + (at < accepted)
            self._seen[at] = fade * seen + (at < drafted and at <= accepted)

    def chances(self, depth: int) -> Iterable[float]:
        """Yield the chance that a draft is accepted, and all before it, by position."""
        rate, chance = _FIRST_RATE, 1.0
        for accepted, seen in zip(self._accepted[:depth], self._seen, strict=False):
            rate = (accepted + _POOLED * rate) / (seen + _POOLED)
            chance *= rate
            yield chance


class DepthController:
    """Owns costs and acceptance rates, and decides from them.

    With acceptance rates a, b, … at its positions, a draft is worth 1 + a + ab + … tokens of its row (for equal rates
    equation 1 of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023).
    """

    def __init__(self, most: int, *, fixed: bool = False, padded: bool = False):
        """`most`: drafts of a row. `fixed`: take them all. `padded`: a row costs as many tokens as the widest row."""
        self.parked: str | None = None  # why no drafts are taken, as a sentence; None while they are
        self._most, self._fixed, self._padded = most, fixed, padded
        self._costs: dict[int, _Costs] = {}  # by number of rows
        self._rates: dict[Hashable, _Rates] = {}  # by row
        self._num_plain = 0  # plain passes that come next
        self._num_waited = self._num_probes = 0  # steps since the last probe, or since drafting began or ended
        self._wait, self._is_probing, self._has_learnt = _WAITS[0], False, False  # a probe lasts until a row has learnt

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take the seconds of a pass. `num_tokens`: the computed tokens, padding included."""
        if num_rows in self._costs and seconds > 0:
            self._costs[num_rows].observe(num_tokens, seconds)

    def learn(self, row: Hashable, drafted: int, accepted: int) -> None:
        """Take the acceptance of a row's drafts. Rows that have ended are left out."""
        if row in self._rates:
            is_old = self._is_probing and self.parked  # the text may have changed
            self._rates[row].learn(drafted, accepted, _PARKED_FADE if is_old else _FADE)
            self._has_learnt = True

    def forget(self, row: Hashable) -> None:
        self._rates.pop(row, None)

    def depths(self, available: Mapping[Row, int]) -> dict[Row, int]:
        """Decide how many drafts each row verifies in the next step; rows without any are left out.

        `available`: the drafts that each decoding row has.
        """
        limits = {row: min(number, self._most) for row, number in available.items()}
        if self._fixed or not any(limits.values()):
            return {row: limit for row, limit in limits.items() if limit > 0}
        if len(limits) not in self._costs:
            self._costs[len(limits)], self._num_plain = _Costs(len(limits)), _NUM_PLAIN
        was_parked = self.parked is not None
        best = self._best(limits, self._costs[len(limits)])
        self._num_waited = 0 if was_parked == bool(best) else self._num_waited + 1
        if self._is_probing and self._has_learnt:
            self._num_waited, self._num_probes = 0, self._num_probes + 1
            self._wait = min(2 * self._wait, _WAITS[1]) if self.parked else _WAITS[0]
            self._num_plain = _NUM_PLAIN if self._num_probes % 2 == 0 else 0
        self._is_probing = self._num_waited >= (self._wait if self.parked else _REFRESH)
        self._has_learnt = False
        self._num_plain -= 1
        if self._num_plain >= 0:
            return {}
        probed = (1, 3, 1, self._most)[self._num_probes % 4]  # the widest too: costs rise in stairs
        return {row: min(limit, probed) for row, limit in limits.items() if limit > 0} if self._is_probing else best

    def _best(self, limits: Mapping[Row, int], costs: _Costs) -> dict[Row, int]:
        """Return the depths with the most expected tokens a second; none, and parked, if they do not win the margin."""
        num_rows, table = len(limits), costs.table(len(limits) * self._most)
        for row in limits.keys() - self._rates.keys():
            self._rates[row] = _Rates(self._most)
        drafts = [
            (chance, depth, row)
            for row, limit in limits.items()
            for depth, chance in enumerate(self._rates[row].chances(limit), 1)
        ]
        drafts.sort(key=lambda draft: draft[1] if self._padded else -draft[0])
        gain, num_taken, tokens, can_win = _MARGIN if self.parked else 1.0, 0, 1.0, False
        for number, (chance, depth, _) in enumerate(drafts, 1):
            more = depth * num_rows if self._padded else number
            if more >= len(table):
                break
            tokens += chance / num_rows
            can_win |= 1 + number / num_rows > _MARGIN * table[more] and num_rows + more <= costs.widest
            if tokens > gain * table[more]:
                gain, num_taken = tokens / table[more], number
        self.parked = None if num_taken else WRONG if can_win else COSTLY
        return Counter(row for _, _, row in drafts[:num_taken])
