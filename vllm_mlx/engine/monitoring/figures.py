"""Rates and quantiles of the last seconds, and histograms since the start. It knows no request and reads no clock."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

RATE_WINDOW_S = 10.0
SAMPLE_WINDOW_S = 60.0
MAX_SAMPLES = 10_000


class TokenRate:
    """Tokens per second over the last RATE_WINDOW_S."""

    def __init__(self, started_s: float):
        self._started_s = started_s
        self._marks: deque[tuple[float, int]] = deque()
        self._num_tokens = 0

    def add(self, num_tokens: int, now: float) -> None:
        if num_tokens:
            self._marks.append((now, num_tokens))
            self._num_tokens += num_tokens
        self._forget(now)

    def per_second(self, now: float) -> float:
        self._forget(now)
        return self._num_tokens / max(1e-3, min(RATE_WINDOW_S, now - self._started_s))

    def _forget(self, now: float) -> None:
        while self._marks and self._marks[0][0] < now - RATE_WINDOW_S:
            self._num_tokens -= self._marks.popleft()[1]


class Quantiles(TypedDict):
    """Number, median, 99th percentile and maximum of the last minute's values; None if there are no values."""

    count: int
    p50: float | None
    p99: float | None
    max: float | None


@dataclass(slots=True)
class Samples:
    """Durations in seconds, kept for SAMPLE_WINDOW_S; at most the last MAX_SAMPLES."""

    _marks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def add(self, seconds: float, now: float) -> None:
        self._marks.append((now, seconds))

    def quantiles(self, now: float) -> Quantiles:
        while self._marks and self._marks[0][0] < now - SAMPLE_WINDOW_S:
            self._marks.popleft()
        values = sorted(seconds for _, seconds in self._marks)
        if not values:
            return {"count": 0, "p50": None, "p99": None, "max": None}
        return {
            "count": len(values),
            "p50": round(_quantile(values, 0.50), 5),
            "p99": round(_quantile(values, 0.99), 5),
            "max": round(values[-1], 5),
        }


def _quantile(values: list[float], share: float) -> float:
    """The smallest of the sorted values that at least this share of them does not exceed."""
    return values[max(0, -int(-share * len(values) // 1) - 1)]


class Histogram:
    """Counts values by bucket. Like in Prometheus, a bucket holds the values up to its bound."""

    def __init__(self, bounds: Iterable[float]):
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield (bound, number of values that do not exceed it). The last bound is infinite."""
        return zip((*self.bounds, float("inf")), accumulate(self._counts), strict=True)


@dataclass(slots=True)
class Latency:
    """One kind of duration: the values of the last minute, and a histogram since the start."""

    histogram: Histogram
    samples: Samples = field(default_factory=Samples)

    def add(self, seconds: float, now: float) -> None:
        self.histogram.add(seconds)
        self.samples.add(seconds, now)
