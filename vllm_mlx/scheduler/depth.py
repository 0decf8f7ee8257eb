"""Decides how many drafts each row verifies in the next step. It knows neither the model nor where drafts come from.

It keeps what a pass cost by its tokens, as a multiple of a plain pass of the same rows, because all costs grow with
the context; and how often each draft of a row was accepted. It takes the depths with the most expected tokens a second
if they win a margin over a plain pass. Otherwise it parks, and looks again now and then.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import mul

_MARGIN = 1.03  # what drafts must win
_HOPE = 0.04  # more of the cost for each token a row, beyond the widest pass that was measured
_FIRST_ODDS = 0.7  # of a draft in a new row
_LEAST_WEIGHT = 0.05  # of the newest draft among those before it
_AFRESH = 20, 3  # drafts that a wrong one and a right one count among in a look: few are seen, so be hopeful
_LOW_ODDS = 0.6  # from which on an accepted draft surprises
_LOOKS = 32, 512  # steps from one look at drafts to the next while parked, at first and at most
_REFRESH = 64  # steps while drafting: by turns a plain pass and a look at another width is made
_MOST_PLAIN = 3  # passes asked for before drafts are tried without a plain pass that has a cost
_KEPT = 5  # costs of a shape whose median counts
_SURE = 3  # costs of a shape that say that it cannot win
_MOST_SHAPES = 64  # numbers of rows, and for each numbers of tokens
_RARE = 8  # every so many looks a width that cannot win is measured too
COSTLY = "Drafts cost more than they save on this machine at this load."
WRONG = "Too few drafts of the running replies are accepted."


class _Costs:
    """The cost of a pass by its tokens, for one number of rows; a plain pass costs 1."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._kept: dict[int, deque[float]] = {}  # tokens -> costs; seconds of the plain pass; the latest used is last
        self._points: list[tuple[int, float]] = [(num_rows, 1.0)]
        self._plain_s = 0.0  # not known
        self._num_asked = 0
        self._looked: set[int] = set()

    def observe(self, num_tokens: int, seconds: float) -> None:
        kept = self._kept.pop(num_tokens, None)
        self._kept[num_tokens] = deque(maxlen=_KEPT) if kept is None else kept
        if len(self._kept) > _MOST_SHAPES:
            self._forget(next(tokens for tokens in self._kept if tokens != self._num_rows))
        if kept is None:  # kernels are compiled in the first pass of a shape
            return
        if num_tokens == self._num_rows:
            kept.append(seconds)
            self._plain_s = _median(kept)
        elif self._plain_s:
            kept.append(seconds / self._plain_s)
            self._points = [point for point in self._points if point[0] != num_tokens]
            insort(self._points, (num_tokens, _median(kept)))

    def _forget(self, num_tokens: int) -> None:
        del self._kept[num_tokens]
        self._points = [point for point in self._points if point[0] != num_tokens]

    def of(self, num_tokens: int) -> float:
        """Interpolate between passes that were measured; be hopeful beyond them."""
        points = self._points
        at = bisect_left(points, (num_tokens, 0.0))
        if at == len(points):
            tokens, cost = points[-1]
            return cost * (1 + _HOPE * (num_tokens - tokens) / self._num_rows)
        tokens, cost = points[at]
        before, low = points[max(at - 1, 0)]
        return cost if before == tokens else low + (cost - low) * (num_tokens - before) / (tokens - before)

    def is_hopeless(self, num_tokens: int) -> bool:
        """Whether a pass, often measured, costs too much even if all its drafts are accepted."""
        is_sure = len(self._kept.get(num_tokens, ())) >= _SURE
        return is_sure and num_tokens / self._num_rows < _MARGIN * self.of(num_tokens)

    def is_new(self, width: int) -> bool:
        """Whether this is the first question about so many tokens a row."""
        is_new, self._looked = width not in self._looked, self._looked | {width}
        return is_new

    def ask_plain(self) -> bool:
        """Whether a plain pass is needed because its cost is not known."""
        self._num_asked += 1
        return not self._plain_s and self._num_asked <= _MOST_PLAIN


class _Odds:
    """How often draft number i of a row was accepted, given that those before it were."""

    def __init__(self, most: int):
        self.right = [_FIRST_ODDS] * most
        self._seen = [1] * most

    def learn(self, drafted: int, accepted: int, *, afresh: bool) -> None:
        for i in range(min(drafted, accepted + 1, len(self.right))):
            self._seen[i] = _AFRESH[i < accepted] if afresh else self._seen[i] + 1
            self.right[i] += max(_LEAST_WEIGHT, 1 / self._seen[i]) * ((i < accepted) - self.right[i])


class DepthController:
    """Owns costs and odds, and decides from them."""

    def __init__(self, most: int, *, fixed: bool = False, padded: bool = False):
        """`most`: drafts of a row. `fixed`: take them all. `padded`: a row costs as many tokens as the widest row."""
        self._most, self._fixed, self._padded = most, fixed, padded
        self._costs: dict[int, _Costs] = {}  # by number of rows; the latest used is last
        self._odds: dict[int, _Odds] = {}
        self._num_steps = self._num_looks = self._next_look = self._since = 0
        self._wait = _LOOKS[0]
        self._is_looking = False  # the step is a look while parked
        self._parked: str | None = None

    @property
    def parked(self) -> str | None:
        """Why no drafts are taken, as a sentence; None while they are."""
        return self._parked

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take the seconds of a step without prefill. `num_tokens`: what the device computed, padding included."""
        if seconds > 0:
            self._costs_of(num_rows).observe(num_tokens, seconds)

    def learn(self, seq_id: int, drafted: int, accepted: int) -> None:
        """Take what became of a row's drafts. Unknown rows are left out: they have ended."""
        if odds := self._odds.get(seq_id):
            is_new = self._is_looking and 0 < drafted == accepted and odds.right[0] < _LOW_ODDS
            odds.learn(drafted, accepted, afresh=self._is_looking)
            if is_new and self._parked == WRONG:
                self._next_look = self._num_steps + 1  # the text may have changed

    def forget(self, seq_id: int) -> None:
        self._odds.pop(seq_id, None)

    def depths(self, available: Mapping[int, int]) -> dict[int, int]:
        """Decide how many drafts each row verifies in the next step; rows without any are left out.

        `available`: the drafts that each decoding row has.
        """
        limits = {seq_id: min(number, self._most) for seq_id, number in available.items()}
        self._is_looking = False
        if self._fixed or not any(limits.values()):
            return _positive(limits)
        for seq_id in limits.keys() - self._odds.keys():
            self._odds[seq_id] = _Odds(self._most)
        self._num_steps += 1
        costs = self._costs_of(len(limits))
        gain, best = self._best(limits, costs)
        return self._drafting(limits, best, costs) if gain > _MARGIN else self._parking(limits, costs)

    def _drafting(self, limits: dict[int, int], best: dict[int, int], costs: _Costs) -> dict[int, int]:
        if self._parked is not None:
            self._parked, self._since = None, self._num_steps
        turn = self._num_steps % (2 * _REFRESH)
        if turn == 0 or costs.ask_plain():
            return {}
        return self._look(limits, costs) if turn == _REFRESH else best

    def _parking(self, limits: dict[int, int], costs: _Costs) -> dict[int, int]:
        if self._parked is None:
            lasted = self._num_steps - self._since > _LOOKS[0]
            self._wait = _LOOKS[0] if lasted else min(2 * self._wait, _LOOKS[1])
            self._next_look = self._num_steps + self._wait
        widest = sum(limits.values()) + len(limits)
        self._parked = COSTLY if widest / len(limits) < _MARGIN * costs.of(widest) else WRONG
        if self._num_steps < self._next_look:
            return {}
        self._next_look, self._is_looking = self._num_steps + self._wait, True
        self._wait = min(2 * self._wait, _LOOKS[1])
        return self._look(limits, costs)

    def _look(self, limits: dict[int, int], costs: _Costs) -> dict[int, int]:
        """Try a width by turns, the widest too: costs rise in stairs."""
        self._num_looks += 1
        width = (2, self._most + 1, 4)[self._num_looks % 3]
        if costs.is_hopeless(width * len(limits)) and self._num_looks % _RARE:
            width = 2
        if self._is_looking and costs.is_new(width):
            self._num_looks, self._next_look = self._num_looks - 1, self._num_steps + 1  # the first pass does not count
        return _positive({seq_id: min(limit, width - 1) for seq_id, limit in limits.items()})

    def _best(self, limits: dict[int, int], costs: _Costs) -> tuple[float, dict[int, int]]:
        """The depths with the most expected tokens a second, and their gain over a plain pass."""
        num_rows, gain, taken, expected = len(limits), 1.0, 0, float(len(limits))
        drafts = [
            (chance, depth, seq_id)
            for seq_id, limit in limits.items()
            for depth, chance in enumerate(accumulate(self._odds[seq_id].right[:limit], mul), 1)
        ]
        drafts.sort(key=lambda draft: draft[1] if self._padded else -draft[0])
        for number, (chance, depth, _) in enumerate(drafts, 1):
            expected += chance
            num_tokens = num_rows * (1 + depth) if self._padded else num_rows + number
            if expected / num_rows > gain * costs.of(num_tokens):
                gain, taken = expected / num_rows / costs.of(num_tokens), number
        return gain, Counter(seq_id for _, _, seq_id in drafts[:taken])

    def _costs_of(self, num_rows: int) -> _Costs:
        costs = self._costs.pop(num_rows, None) or _Costs(num_rows)
        self._costs[num_rows] = costs
        if len(self._costs) > _MOST_SHAPES:
            del self._costs[next(iter(self._costs))]
        return costs


def _median(numbers: Iterable[float]) -> float:
    """The lower of two in the middle."""
    ordered = sorted(numbers)
    return ordered[(len(ordered) - 1) // 2]


def _positive(depths: Mapping[int, int]) -> dict[int, int]:
    return {seq_id: depth for seq_id, depth in depths.items() if depth > 0}
