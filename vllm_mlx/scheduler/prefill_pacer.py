"""Decides where prefill chunks end. It learns from measured chunks and reads no clock itself.

Chunks end at multiples of GRID, unless a resume point, an image or the end of the prompt comes first. While nothing
decodes they end at multiples of their own length, which is a power of two. A request alone also tries longer ones.
"""

import math
from dataclasses import dataclass

from ..core.config import DEFAULT_STALL_MS
from ..core.memory import SHORTEST_CHUNK, AttentionCost
from ..core.step import ChunkTiming

# No Mac has verified these constants.
GRID = 64  # tokens; shorter chunks are hardly quicker, because the weights are read in any case
_IDLE_STALLS = 5  # a step without decoding may take this many stall limits: long chunks, but quick aborts
_MAX_IDLE_S = 1.0  # at most this long, so that the watchdog of a GPU sees short work
# The next two come from the device model of tests/support.
_MAX_ALONE_S = 3.0  # if one request is alone, a longer chunk may take this long if it is quicker by the token
_WORTH_WAITING = 0.97  # its seconds a token, as a share of those of the shorter one, at most
_STALL_STEPS = 2  # if no limit is given, replies may pause for this many passes over the weights and the rows
_MOST_STALLS = 2  # such a pause takes at most this many default limits
_LEAST_TO_EDGE = 16  # tokens of the shortest chunk that a return to the grid is worth
_WORTH_HALVING = 0.8  # a chunk may have half of GRID tokens if these take at most this share of the seconds
_MAX_GROWTH = 2  # while rows decode, a chunk is at most this many times longer than any measured one
_GROWTH = 16  # after memory pressure, a chunk within memory makes the next one longer by 1/16
_TRIALS = 64  # chunks within memory before a length that exceeded memory is tried again
_UNKNOWN_SHARE = 0.7  # of the seconds for a chunk during replies, if no chunk was measured at its depth
_FIRST_PROBE = 256  # tokens of the longest chunk that calibration measured of every model
LONG_PROBE = 1024  # tokens of the one that it measured of a mixture of experts
_SHALLOW = 1024  # tokens; all chunks that begin before are at one depth, and each doubling is another
_SLOWER, _QUICKER = 0.5, 0.25  # weight of the newest chunk in the average of its depth: pauses must not grow
_ODD = 1.5  # a chunk counts as this many times slower or faster than the average, at most


@dataclass(frozen=True, slots=True)
class Budget:
    """The seconds that prefill may add to one step."""

    seconds: float
    is_idle: bool = False  # nothing else runs, and no other tenant is expected
    is_alone: bool = False  # there is one request


class ChunkSpeed:
    """Expects a chunk to take an overhead, and for each token the average of earlier chunks at about its depth."""

    def __init__(self, *, overhead_s: float, tokens_per_s: float):
        """Take the figures of a first measurement, at the beginning of a prompt."""
        self.overhead_s = overhead_s
        self._s_per_token = {_depth(0): 1 / tokens_per_s}  # by depth

    def observe(self, timing: ChunkTiming) -> float:
        """Learn from a chunk. Returns how many times longer it took than expected."""
        ratio = timing.seconds / self.chunk_s(timing.num_tokens, timing.start)
        self.overhead_s = min(self.overhead_s, timing.seconds)
        known_s = self._token_s(timing.start)
        measured_s = (timing.seconds - self.overhead_s) / timing.num_tokens
        measured_s = min(_ODD * known_s, max(known_s / _ODD, measured_s))
        weight = _SLOWER if measured_s > known_s else _QUICKER
        self._s_per_token[_depth(timing.start)] = known_s + weight * (measured_s - known_s)
        return ratio

    def chunk_s(self, num_tokens: int, start: int) -> float:
        """Return the expected seconds of a chunk of `num_tokens` tokens after `start` others."""
        return self.overhead_s + num_tokens * self._token_s(start)

    def tokens_within(self, seconds: float, start: int) -> int:
        """Return tokens of the chunk after `start` others that is expected to take `seconds`."""
        return int(max(0.0, seconds - self.overhead_s) / self._token_s(start))

    def knows(self, start: int) -> bool:
        """Return whether a chunk was measured at this depth."""
        return _depth(start) in self._s_per_token

    def _token_s(self, start: int) -> float:
        """Return the average at this depth, or at the deepest one before it that was measured."""
        known = max(depth for depth in self._s_per_token if depth <= _depth(start))
        return self._s_per_token[known]


def _depth(start: int) -> int:
    """Return the tokens before a chunk, rounded up so that there are few depths."""
    return max(_SHALLOW, 1 << start.bit_length())


class PrefillPacer:
    """Owns the limits of chunks: the time that a step may take, and the memory."""

    def __init__(
        self,
        *,
        max_stall_s: float | None,
        max_chunk: int,
        tokens_per_s: float,
        overhead_s: float,
        half_share: float = 1.0,
        long_probe_s: float | None = None,
        attention: AttentionCost = AttentionCost(),  # noqa: B008 - it is immutable
        whole_prompts: bool = False,
    ):
        """If `max_stall_s` is None, a machine with slow steps may take longer than the default.

        `overhead_s` are the seconds of a chunk in addition to those of its tokens. `half_share` are the seconds of a
        chunk of half of GRID tokens, as a share of those of GRID tokens. With `whole_prompts`, no prompt is cut.
        `long_probe_s` are the seconds of LONG_PROBE tokens, if they were measured.
        """
        self.whole_prompts = whole_prompts
        stall_s = DEFAULT_STALL_MS / 1000 if max_stall_s is None else max_stall_s
        self._is_given = max_stall_s is not None
        self._stall_s = stall_s
        self._idle_s = max(stall_s, min(_IDLE_STALLS * stall_s, _MAX_IDLE_S))
        self._attention = attention
        self._max_chunk = max_chunk
        self.longest_chunk = max_chunk  # tokens; less under memory pressure
        self._too_long = max_chunk + 1  # tokens of the last chunk that exceeded memory
        self._num_full_chunks = 0  # full-length chunks within memory since the limit moved
        self._speed = ChunkSpeed(overhead_s=overhead_s, tokens_per_s=tokens_per_s)
        # seconds a token by depth and length, if that is a power of two
        self._by_length = {} if long_probe_s is None else {_depth(0): {LONG_PROBE: long_probe_s / LONG_PROBE}}
        self.decode_s = 0.0  # a cautious estimate from recent steps
        self._last_decode_s = 0.0
        self._least_decode_s = 0.0  # the shorter of two steps, because one may be slow for another reason
        self._longest = _FIRST_PROBE  # tokens of the longest measured chunk
        self._caution = 1.0  # measured over expected time, if recent chunks were slower
        self._score_s = 0.0  # for a token whose log-probability is wanted, in the last chunk
        self._shortest = GRID // 2 if half_share <= _WORTH_HALVING else GRID

    @property
    def max_stall_s(self) -> float:
        """Seconds that replies may pause while a prompt is computed."""
        relative_s = _STALL_STEPS * (self._speed.overhead_s + self._least_decode_s)
        return self._stall_s if self._is_given else max(self._stall_s, min(relative_s, _MOST_STALLS * self._stall_s))

    def shorten(self, num_tokens: int) -> bool:
        """Halve the limit, because a chunk of this length exceeded memory. Returns False at the minimum."""
        self._num_full_chunks = 0
        shorter = min(self.longest_chunk, max(SHORTEST_CHUNK, num_tokens // 2))
        if shorter == self.longest_chunk:
            return False
        self.longest_chunk, self._too_long = shorter, num_tokens
        return True

    def lengthen(self, num_tokens: int) -> None:
        """Raise the limit again, step by step, because a chunk of this length ran within memory."""
        if self.longest_chunk == self._max_chunk or num_tokens < _power_of_two(self.longest_chunk):
            return
        self._num_full_chunks += 1
        longer = self.longest_chunk + 1 + self.longest_chunk // _GROWTH
        if longer < self._too_long or self._num_full_chunks >= _TRIALS:
            self.longest_chunk, self._num_full_chunks = min(self._max_chunk, longer), 0

    def observe_chunk(self, timing: ChunkTiming) -> None:
        """Learn from a chunk. A short one is ignored, because its time is mostly overhead, or that of few experts."""
        self._score_s = timing.score_s / timing.num_tokens if timing.score_s else self._score_s
        if timing.num_tokens < min(GRID, self._max_chunk):
            return
        if timing.num_tokens == _power_of_two(timing.num_tokens):
            depth = self._by_length.setdefault(_depth(timing.start), {})
            token_s = timing.seconds / timing.num_tokens
            depth[timing.num_tokens] = (depth.get(timing.num_tokens, token_s) + token_s) / 2  # some begin deeper
        is_long = timing.num_tokens > self._timely_length(timing.start)
        if is_long and timing.seconds < self.chunk_s(timing.num_tokens, timing.start):
            return  # experts are read less often for a token of a long chunk: short ones are not so quick
        ratio = self._speed.observe(timing)
        self._caution = max(1.0, ratio, (1 + self._caution) / 2)
        self._longest = max(self._longest, timing.num_tokens)

    def observe_decode(self, seconds: float) -> None:
        self.decode_s = max(seconds, (self.decode_s + seconds) / 2)
        self._least_decode_s, self._last_decode_s = min(seconds, self._last_decode_s), seconds

    def budget(self, *, decoding: bool, most_s: float = math.inf, is_alone: bool = False) -> Budget:
        """Return the time that prefill may add to a step, at most `most_s`. `is_alone`: there is one request."""
        seconds = min(most_s, self._idle_s)
        if not decoding:
            return Budget(seconds, is_idle=seconds == self._idle_s, is_alone=is_alone)
        return Budget(max(0.0, min(seconds, self.max_stall_s - self.decode_s)))

    def chunk_end(self, start: int, budget: Budget, num_left: int = 1 << 40) -> int:
        """Return the position at which a chunk after `start` tokens ends, if nothing cuts it.

        `num_left`: tokens up to the end of the prompt. A length that has never run is not tried on fewer.
        """
        in_memory = min(self.longest_chunk, self._attention.longest_chunk(start))
        if budget.is_idle:
            length = self._idle_length(start, _power_of_two(in_memory), num_left, is_alone=budget.is_alone)
            return _edge(start, length, grid=length)
        shortest = self.shortest_chunk(budget.seconds, start)
        to_edge = -start % shortest or shortest
        if to_edge < _LEAST_TO_EDGE and self.chunk_s(to_edge + shortest, start) <= budget.seconds:
            to_edge += shortest
        longest = min(in_memory, max(to_edge, self.chunk_tokens(budget.seconds, start)))
        return _edge(start, longest, grid=min(GRID, _power_of_two(longest)))

    def chunk_tokens(self, budget_s: float, start: int = 0) -> int:
        """Return the longest chunk after `start` expected to take `budget_s`, in tokens; at least the shortest."""
        is_careful = budget_s <= self.max_stall_s
        longest = min(self.longest_chunk, _MAX_GROWTH * self._longest) if is_careful else self.longest_chunk
        if is_careful and not self._speed.knows(start):
            budget_s *= _UNKNOWN_SHARE
        tokens = self._speed.tokens_within(budget_s / self._caution, start)
        return min(longest, max(self.shortest_chunk(budget_s, start), tokens), self._attention.longest_chunk(start))

    def shortest_chunk(self, budget_s: float, start: int) -> int:
        """Return the shortest chunk during replies: GRID tokens, or half if time is short and that is quicker."""
        return self._shortest if self.chunk_s(GRID, start) > budget_s else GRID

    def scored_tokens(self, num_tokens: int, start: int) -> int:
        """Return tokens that, with their log-probabilities, take as long as `num_tokens` without."""
        seconds = self.chunk_s(num_tokens, start) - self._speed.overhead_s
        return max(1, int(num_tokens * seconds / (seconds + num_tokens * self._score_s)))

    def _idle_length(self, start: int, most: int, num_left: int, *, is_alone: bool) -> int:
        """Return tokens of a chunk after `start` others while nothing else runs: the quickest length, or one to try."""
        length = shortest = min(most, self._timely_length(start))
        limit_s = max(self._idle_s, _MAX_ALONE_S) if is_alone else self._idle_s
        token_s = self.chunk_s(length, start) / length
        here: dict[int, float] = {}
        known: dict[int, float] = {}  # of the deepest chunk that was measured, by length
        for depth in range(_SHALLOW.bit_length(), _depth(start).bit_length() + 1):
            here = self._by_length.get(1 << (depth - 1), {})
            known |= here
            while length > shortest and length * known.get(length, token_s) > limit_s:
                length //= 2
            token_s = known.get(length, token_s)
            for longer in sorted(here.keys() & range(length + 1, most + 1)):
                if here[longer] < min(_WORTH_WAITING * token_s, limit_s / longer):
                    length, token_s = longer, here[longer]
        longer = 2 * length
        while longer in here:
            token_s, longer = here[longer], 2 * longer
        is_timely = longer <= min(most, num_left) and longer * max(token_s, known.get(longer, 0)) <= limit_s
        return longer if is_alone and is_timely else length

    def _timely_length(self, start: int) -> int:
        """Return the longest chunk after `start` tokens that is expected to be short enough for an idle server."""
        length = _power_of_two(self._max_chunk)
        while length > GRID and self.chunk_s(length, start) > self._idle_s:
            length //= 2
        return length

    def fixed_chunk(self, num_tokens: int, start: int) -> int:
        """Return a chunk's tokens after `start` others if lengths depend on positions alone, halved to fit memory."""
        longest = min(self.longest_chunk, self._attention.longest_chunk(start))
        while num_tokens > max(longest, SHORTEST_CHUNK):
            num_tokens //= 2
        return num_tokens

    def chunk_s(self, num_tokens: int, start: int = 0) -> float:
        """Return the expected seconds of a chunk of `num_tokens` tokens after `start` others."""
        return self._speed.chunk_s(num_tokens, start)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above `number`."""
    return 1 << (number.bit_length() - 1)


def _edge(start: int, longest: int, grid: int) -> int:
    """Return the last multiple of `grid`, or of its half if near, that a chunk of `longest` tokens reaches."""
    end = (start + longest) // grid * grid
    while end - start < GRID < grid:
        grid //= 2
        end = (start + longest) // grid * grid
    return end
