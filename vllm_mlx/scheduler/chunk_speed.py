"""Learns from measured chunks how long the next one will take. It reads no clock itself."""

import math
from dataclasses import dataclass

from ..core.step import ChunkTiming

_ODD = 1.5  # a chunk that took this many times as long as expected, or as short, counts if the next one did too
_FORGET = 0.9  # factor of older measurements at each new chunk at the same depth
_SHALLOW = 1024  # tokens; all below are one depth, and each doubling is another
_LEAST_S = 1e-9  # seconds of a token


@dataclass(slots=True)
class _Depth:
    """Sums over chunks that came after about as many tokens, in which newer and longer ones weigh more."""

    num_tokens: float = 0.0
    pairs: float = 0.0
    seconds: float = 0.0  # without overhead

    def add(self, num_tokens: int, pairs: float, seconds: float) -> None:
        self.num_tokens = _FORGET * self.num_tokens + num_tokens
        self.pairs = _FORGET * self.pairs + pairs
        self.seconds = _FORGET * self.seconds + seconds


def depth_of(start: int) -> int:
    """The tokens before a chunk, rounded up so that there are few depths."""
    return max(_SHALLOW, 1 << start.bit_length())


class ChunkSpeed:
    """Predicts that a chunk of n tokens after s others takes `overhead + a·n + b·(n·s + n²/2)`; b stands for attention.

    a and b are fitted to the mean rate at each depth by least squares of relative errors. So one long prompt does not
    make the machine forget how quick chunks are at the beginning of the next one.
    """

    def __init__(self, *, overhead_s: float, tokens_per_s: float, num_tokens: int):
        """The figures of a first measurement, of a chunk of `num_tokens` at the beginning of a prompt."""
        self.overhead_s = overhead_s
        self._s_per_token = 1 / tokens_per_s
        self._s_per_pair = 0.0
        self._was_odd = False
        self._depths: dict[int, _Depth] = {}
        self._fit(ChunkTiming(0, num_tokens, overhead_s + num_tokens / tokens_per_s))

    def observe(self, timing: ChunkTiming) -> float:
        """Learn from a chunk. Returns how many times longer it took than expected."""
        ratio = timing.seconds / max(_LEAST_S, self.chunk_s(timing.num_tokens, timing.start))
        is_odd = not 1 / _ODD <= ratio <= _ODD
        if self._was_odd or not is_odd:
            self._fit(timing)
        self._was_odd = is_odd
        return ratio

    def chunk_s(self, num_tokens: int, start: int = 0) -> float:
        """Expected seconds of a chunk of `num_tokens` tokens after `start` others."""
        return self.overhead_s + num_tokens * self._s_per_token + _pairs(num_tokens, start) * self._s_per_pair

    def tokens_within(self, seconds: float, start: int) -> int:
        """Tokens of the chunk after `start` others that is expected to take `seconds`."""
        room_s = max(0.0, seconds - self.overhead_s)
        square, linear = self._s_per_pair / 2, self._s_per_token + self._s_per_pair * start
        if square * room_s < 1e-12 * linear * linear:
            return int(room_s / linear)
        return int((math.sqrt(linear * linear + 4 * square * room_s) - linear) / (2 * square))

    def _fit(self, timing: ChunkTiming) -> None:
        self.overhead_s = min(self.overhead_s, timing.seconds)
        net_s = max(_LEAST_S * timing.num_tokens, timing.seconds - self.overhead_s)
        depth = self._depths.setdefault(depth_of(timing.start), _Depth())
        depth.add(timing.num_tokens, _pairs(timing.num_tokens, timing.start), net_s)
        n = x = xx = y = xy = 0.0
        for sums in self._depths.values():
            position, rate = sums.pairs / sums.num_tokens, sums.seconds / sums.num_tokens
            weight = 1 / (rate * rate)
            n, x, xx = n + weight, x + weight * position, xx + weight * position * position
            y, xy = y + weight * rate, xy + weight * position * rate
        spread = n * xx - x * x
        slope = (n * xy - x * y) / spread if spread > 1e-3 * n * xx else 0.0
        slope = min(max(0.0, slope), xy / xx)  # neither term is negative
        self._s_per_pair, self._s_per_token = slope, max(_LEAST_S, (y - slope * x) / n)


def _pairs(num_tokens: int, start: int) -> float:
    """Number of pairs of a token and a token that it attends to."""
    return num_tokens * (start + num_tokens / 2)
