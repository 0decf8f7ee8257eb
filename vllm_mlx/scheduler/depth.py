"""Decides how many drafts each row verifies in the next step. It knows neither the model nor where drafts come from.

It keeps the cost of a pass by its tokens, and a moving average of the acceptance rate at each position of a row's
drafts. It takes the depths with the most expected tokens a second if they win a margin over a plain pass. Otherwise it
parks at depth 0. Probes of other depths, with a back-off while parked, keep both figures up to date.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping
from itertools import accumulate
from operator import mul
from statistics import median_low
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Row = TypeVar("Row", bound=Hashable)

_MARGIN = 1.03  # what drafts must win
_HOPE = 0.04  # more of the cost for each token a row, beyond the widest pass that was measured
_FIRST_RATE = 0.7  # acceptance rate of a draft in a new row
_LEAST_WEIGHT = 0.05  # of the newest draft in the moving average
_KEPT = 5  # passes of a width whose median is its cost
_NUM_PLAIN = 3  # plain passes in a row: where steps run one ahead, the third is the first that can be measured
_WAITS = 32, 512  # steps from one probe to the next while parked, at first and at most
_REFRESH = 128  # the same while drafting; plain passes follow each probe
_PROBE_SHARE = 0.01  # of the time, which probes may lose
COSTLY = "Drafts cost more than they save on this machine at this load."
WRONG = "Too few drafts of the running replies are accepted."


class _Costs:
    """The cost of a pass by its tokens, for one number of rows, as a multiple of a plain pass."""

    def __init__(self, num_rows: int):
        self.num_plain = _NUM_PLAIN  # plain passes that are wanted
        self.num_rows = num_rows
        self._plain_s: deque[float] = deque(maxlen=_KEPT)
        self._measured: dict[int, deque[float]] = {}  # by tokens
        self._costs = {num_rows: 1.0}

    def observe(self, num_tokens: int, seconds: float) -> None:
        if num_tokens == self.num_rows:
            self._plain_s.append(seconds)
        elif num_tokens not in self._measured:
            self._measured[num_tokens] = deque(maxlen=_KEPT)  # kernels are compiled in the first pass of a width
        elif self._plain_s:
            self._measured[num_tokens].append(seconds / median_low(self._plain_s))
            self._costs[num_tokens] = median_low(self._measured[num_tokens])

    def of(self, num_tokens: Iterable[int]) -> NDArray[np.float64]:
        """Interpolate between widths that were measured; be hopeful beyond them."""
        tokens, known = np.array(list(num_tokens)), sorted(self._costs)
        hope = 1 + _HOPE * np.maximum(0, tokens - known[-1]) / self.num_rows
        return np.interp(tokens, known, [self._costs[at] for at in known]) * hope


class _Rates:
    """The acceptance rate at each position of a row's drafts, given that those before it were accepted."""

    def __init__(self, most: int):
        self.right = [_FIRST_RATE] * most
        self._seen = [1] * most

    def learn(self, drafted: int, accepted: int) -> None:
        for i in range(min(drafted, accepted + 1, len(self.right))):
            self._seen[i] += 1
            self.right[i] += max(_LEAST_WEIGHT, 1 / self._seen[i]) * ((i < accepted) - self.right[i])


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
        self._num_steps = self._num_probes = self._began = 0  # `_began`: the step in which drafting began
        self._wait = _WAITS[0] // 2
        self._next_probe = _REFRESH
        self._is_probing = self._has_probed = False

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take the seconds of a pass. `num_tokens`: what the device computed, padding included."""
        if seconds > 0:
            self._costs_of(num_rows).observe(num_tokens, seconds)

    def learn(self, row: Hashable, drafted: int, accepted: int) -> None:
        """Take what became of a row's drafts. Unknown rows are left out: they have ended."""
        if row not in self._rates:
            return
        self._has_probed = self._is_probing
        is_surprise = self._is_probing and self.parked == WRONG and 0 < drafted == accepted
        if is_surprise and self._rates[row].right[0] < _FIRST_RATE:
            self._rates[row] = _Rates(self._most)  # the text may have changed
        self._rates[row].learn(drafted, accepted)

    def forget(self, row: Hashable) -> None:
        self._rates.pop(row, None)

    def depths(self, available: Mapping[Row, int]) -> dict[Row, int]:
        """Decide how many drafts each row verifies in the next step; rows without any are left out.

        `available`: the drafts that each decoding row has. A probe is repeated until a row has learnt from it.
        """
        limits = {row: min(number, self._most) for row, number in available.items()}
        if self._fixed or not any(limits.values()):
            return _clipped(limits, self._most)
        for row in limits.keys() - self._rates.keys():
            self._rates[row] = _Rates(self._most)
        self._num_steps += 1
        costs = self._costs_of(len(limits))
        best = self._best(limits, costs)
        if self._has_probed:
            self._num_probes, self._has_probed = self._num_probes + 1, False
            self._wait = min(2 * self._wait, _WAITS[1])
            costs.num_plain = _NUM_PLAIN if self.parked is None else 0
            self._plan_probe(costs)
        self._is_probing = costs.num_plain <= 0 and self._num_steps >= self._next_probe
        costs.num_plain -= 1
        if costs.num_plain >= 0:
            return {}
        return _clipped(limits, self._probed_depth()) if self._is_probing else best

    def _best(self, limits: Mapping[Row, int], costs: _Costs) -> dict[Row, int]:
        """The depths with the most expected tokens a second; none if they do not win the margin."""
        num_rows = len(limits)
        drafts = [
            (chance, depth, row)
            for row, limit in limits.items()
            for depth, chance in enumerate(accumulate(self._rates[row].right[:limit], mul), 1)
        ]
        drafts.sort(key=lambda draft: draft[1] if self._padded else -draft[0])
        numbers = range(1, len(drafts) + 1)
        cost = costs.of(num_rows * (1 + drafts[i - 1][1]) if self._padded else num_rows + i for i in numbers)
        gains = (1 + np.cumsum([chance for chance, _, _ in drafts]) / num_rows) / cost
        taken = int(gains.argmax())
        if gains[taken] > _MARGIN:
            self._park(None, costs)
            return Counter(row for _, _, row in drafts[: taken + 1])
        can_win = ((1 + np.array(numbers) / num_rows) / cost).max() > _MARGIN
        self._park(WRONG if can_win else COSTLY, costs)
        return {}

    def _park(self, reason: str | None, costs: _Costs) -> None:
        """Begin to draft if there is no reason not to; else park."""
        before, self.parked = self.parked, reason
        if before is not None and reason is None:
            self._began, self._next_probe = self._num_steps, self._num_steps + _REFRESH
        elif before is None and reason is not None:
            has_lasted = self._num_steps - self._began > _WAITS[0]
            self._wait = _WAITS[0] if has_lasted else min(2 * self._wait, _WAITS[1])
            self._plan_probe(costs)

    def _plan_probe(self, costs: _Costs) -> None:
        [cost] = costs.of([costs.num_rows * (1 + self._probed_depth())])
        wait = _REFRESH if self.parked is None else self._wait
        self._next_probe = self._num_steps + max(wait, int((cost - 1) / _PROBE_SHARE))

    def _probed_depth(self) -> int:
        """Probe the widest depth too: costs rise in stairs."""
        return (1, 3, self._most)[self._num_probes % 3]

    def _costs_of(self, num_rows: int) -> _Costs:
        return self._costs.setdefault(num_rows, _Costs(num_rows))


def _clipped(depths: Mapping[Row, int], most: int) -> dict[Row, int]:
    return {row: min(depth, most) for row, depth in depths.items() if depth > 0}
