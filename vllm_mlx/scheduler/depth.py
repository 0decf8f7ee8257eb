"""Decides how many drafts each row verifies in the next step. It knows neither the model nor where drafts come from.

It keeps the cost of a pass by its tokens, and a moving average of the acceptance rate at each position of a row's
drafts. It takes the depths with the most expected tokens a second if they win a margin over a plain pass. Otherwise it
parks at depth 0. Probes of other depths, with a back-off while parked, keep both figures up to date.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median_low
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Row = TypeVar("Row", bound=Hashable)

_MARGIN = 1.03  # what drafts must win to begin; they go on while they win at all
_HOPE = 0.04  # more of the cost for each token a row, beyond the widest pass that was measured
_FIRST_RATE = 0.7  # acceptance rate at each position of a new row
_LEAST_WEIGHT = 0.04  # of the newest draft in the moving average
_KEPT = 5  # passes of a width whose median is its cost
_NUM_PLAIN = 3  # plain passes in a row: where steps run one ahead, the third is the first that can be measured
_WAITS = 32, 512  # steps from one probe to the next while parked, at first and at most
_REFRESH = 64  # the same while drafting; plain passes follow every second probe
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

    @property
    def is_known(self) -> bool:
        """Whether a width was measured, other than that of a plain pass."""
        return len(self._costs) > 1

    @property
    def widest(self) -> float:
        """The cost of the widest pass that was measured."""
        return self._costs[max(self._costs)]

    def of(self, num_tokens: Iterable[int]) -> NDArray[np.float64]:
        """Interpolate between widths that were measured; be hopeful up to twice the widest of them."""
        tokens, known = np.array(list(num_tokens)), sorted(self._costs)
        hope = 1 + _HOPE * np.maximum(0, tokens - known[-1]) / self.num_rows
        if self._plain_s:
            hope[tokens > 2 * known[-1]] = np.inf
        costs: NDArray[np.float64] = np.interp(tokens, known, [self._costs[at] for at in known]) * hope
        return costs


@dataclass(slots=True)
class _Rate:
    """The acceptance rate at a position, given that the drafts before it were accepted: a moving average."""

    value: float = _FIRST_RATE
    weight: float = 0.35  # of the next draft


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
        self._rates: dict[Hashable, list[_Rate]] = {}  # by row and position
        self._num_steps = self._num_probes = 0
        self._wait = _WAITS[0]
        self._next_probe: int | None = _REFRESH  # the step; None: the last probe has just ended
        self._is_probing = False

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take the seconds of a pass. `num_tokens`: what the device computed, padding included."""
        if seconds > 0:
            self._costs.setdefault(num_rows, _Costs(num_rows)).observe(num_tokens, seconds)

    def learn(self, row: Hashable, drafted: int, accepted: int) -> None:
        """Take what became of a row's drafts. Unknown rows are left out: they have ended."""
        if row not in self._rates:
            return
        if self._is_probing:
            self._next_probe = None
            if self.parked == WRONG and 2 * accepted > drafted and self._rates[row][0].value < _FIRST_RATE:
                self._rates[row] = [_Rate() for _ in range(self._most)]  # the text may have changed
        for i, rate in enumerate(self._rates[row][: min(drafted, accepted + 1)]):
            rate.value += rate.weight * ((i < accepted) - rate.value)
            rate.weight = max(_LEAST_WEIGHT, rate.weight / (1 + rate.weight))

    def forget(self, row: Hashable) -> None:
        self._rates.pop(row, None)

    def depths(self, available: Mapping[Row, int]) -> dict[Row, int]:
        """Decide how many drafts each row verifies in the next step; rows without any are left out.

        `available`: the drafts that each decoding row has. A probe is repeated until a row has learnt from it.
        """
        limits = {row: min(number, self._most) for row, number in available.items()}
        if self._fixed or not any(limits.values()):
            return _clipped(limits, self._most)
        self._num_steps += 1
        costs = self._costs.setdefault(len(limits), _Costs(len(limits)))
        was_parked = self.parked is not None
        best = self._best(limits, costs)
        if self._next_probe is None or was_parked == bool(best):
            self._plan_probe(costs, has_changed=was_parked == bool(best))
        costs.num_plain -= 1
        self._is_probing = costs.num_plain < 0 and self._num_steps >= (self._next_probe or 0)
        if costs.num_plain >= 0:
            return {}
        return _clipped(limits, self._probed_depth) if self._is_probing else best

    def _best(self, limits: Mapping[Row, int], costs: _Costs) -> dict[Row, int]:
        """The depths with the most expected tokens a second; none, and parked, if they do not win the margin."""
        num_rows = len(limits)
        for row in limits.keys() - self._rates.keys():
            self._rates[row] = [_Rate() for _ in range(self._most)]
        drafts = [
            (chance, depth, row)
            for row, limit in limits.items()
            for depth, chance in enumerate(accumulate((rate.value for rate in self._rates[row][:limit]), mul), 1)
        ]
        drafts.sort(key=lambda draft: draft[1] if self._padded else -draft[0])
        added = np.arange(1, len(drafts) + 1) / num_rows
        cost = costs.of(
            num_rows * (1 + draft[1]) if self._padded else num_rows + i for i, draft in enumerate(drafts, 1)
        )
        gains = (1 + np.cumsum([chance for chance, _, _ in drafts]) / num_rows) / cost
        if gains.max() > (1 if self.parked is None and costs.is_known else _MARGIN):
            self.parked = None
            return Counter(row for _, _, row in drafts[: int(gains.argmax()) + 1])
        can_win = (1 + added > _MARGIN * cost) & (cost <= costs.widest)
        self.parked = WRONG if can_win.any() else COSTLY
        return {}

    def _plan_probe(self, costs: _Costs, *, has_changed: bool) -> None:
        """Plan a probe: after one, or because drafting has begun or ended."""
        is_drafting = self.parked is None
        if self._next_probe is None:
            self._num_probes += 1
            self._wait = _WAITS[0] if is_drafting and not has_changed else min(2 * self._wait, _WAITS[1])
            costs.num_plain = _NUM_PLAIN if is_drafting and self._num_probes % 2 == 0 else 0
        [cost] = costs.of([costs.num_rows * (1 + self._probed_depth)])
        wait = _REFRESH if is_drafting else self._wait
        self._next_probe = self._num_steps + max(wait, int((min(cost, 1 + self._probed_depth) - 1) / _PROBE_SHARE))

    @property
    def _probed_depth(self) -> int:
        return (1, 3, 1, self._most)[self._num_probes % 4]  # the widest too: costs rise in stairs


def _clipped(depths: Mapping[Row, int], most: int) -> dict[Row, int]:
    return {row: min(depth, most) for row, depth in depths.items() if depth > 0}
