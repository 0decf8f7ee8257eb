"""Decides how many prompt tokens one step may prefill. It learns from measured chunks and reads no clock itself."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows

from ..core.memory import SHORTEST_CHUNK, AttentionCost
from ..core.sequence import Sequence, SequenceStatus
from ..core.step import ChunkTiming, PrefillChunk

MIN_CHUNK = 16  # tokens; so that a slow machine makes progress too
_IDLE_STALLS = 5  # a step without decoding may take this many stall limits: long chunks, but quick aborts
_MAX_GROWTH = 2  # a chunk beside decoding rows is at most this many times longer than any measured one
_MIN_FITTED = 64
_GROWTH = 16  # after memory pressure, a chunk within memory makes the next one longer by 1/16
_TRIALS = 64  # chunks within memory before a length that exceeded memory is tried again
_FIRST_PROBE = 256  # tokens of the chunk that calibration measured
_FORGET = 0.9  # factor of older measurements at each new chunk


class PrefillPacer:
    """Predicts that a chunk of n tokens after s others takes `overhead + a·n + b·(n·s + n²/2)`; b stands for attention.

    a and b are fitted to measured chunks by least squares, in which newer and longer chunks weigh more.
    """

    def __init__(
        self,
        *,
        max_stall_s: float,
        max_chunk: int,
        tokens_per_s: float,
        overhead_s: float,
        attention: AttentionCost = AttentionCost(),  # noqa: B008 - it is immutable
    ):
        self.max_stall_s = max_stall_s
        self._attention = attention
        self._max_chunk = max_chunk
        self._longest_now = max_chunk  # less under memory pressure
        self._too_long = max_chunk + 1  # tokens of the last chunk that exceeded memory
        self._num_full_chunks = 0  # full-length chunks within memory since the limit moved
        self._overhead_s = overhead_s
        self._decode_s = 0.0
        self._longest = _FIRST_PROBE  # tokens of the longest measured chunk
        self._s_per_token = 1 / tokens_per_s
        self._s_per_pair = 0.0
        self._caution = 1.0  # measured over expected time, if recent chunks were slower
        self._sums = [0.0] * 5
        self._fit(ChunkTiming(0, self._longest, overhead_s + self._longest / tokens_per_s))

    @property
    def longest_chunk(self) -> int:
        """Tokens of the longest chunk that memory allows now."""
        return self._longest_now

    def shorten(self, num_tokens: int) -> bool:
        """A chunk of this length exceeded memory: halve the limit. Returns False at the minimum."""
        self._num_full_chunks = 0
        shorter = min(self._longest_now, max(SHORTEST_CHUNK, num_tokens // 2))
        if shorter == self._longest_now:
            return False
        self._longest_now, self._too_long = shorter, num_tokens
        return True

    def lengthen(self, num_tokens: int) -> None:
        """A chunk of this length ran within memory: raise the limit again, step by step."""
        if self._longest_now == self._max_chunk or num_tokens < self._longest_now:
            return
        self._num_full_chunks += 1
        longer = self._longest_now + 1 + self._longest_now // _GROWTH
        if longer < self._too_long or self._num_full_chunks >= _TRIALS:
            self._longest_now, self._num_full_chunks = min(self._max_chunk, longer), 0

    def observe_chunk(self, timing: ChunkTiming) -> None:
        if timing.num_tokens < MIN_CHUNK:
            self._overhead_s = min(self._overhead_s, timing.seconds)
            return
        expected_s = self.chunk_s(timing.num_tokens, timing.start)
        self._caution = max(1.0, timing.seconds / expected_s, (1 + self._caution) / 2)
        self._longest = max(self._longest, timing.num_tokens)
        if timing.num_tokens >= _MIN_FITTED:  # the time of a short chunk is mostly overhead
            self._fit(timing)

    def observe_decode(self, seconds: float) -> None:
        self._decode_s = max(seconds, (self._decode_s + seconds) / 2)

    def step_budget_s(self, *, decoding: bool, resting: bool = False) -> float:
        """Seconds of prefill that one step may add. `resting`: there are rows that decode, though not in this step."""
        if decoding:
            return max(0.0, self.max_stall_s - self._decode_s)
        return self.max_stall_s if resting else _IDLE_STALLS * self.max_stall_s

    def chunk_tokens(self, budget_s: float, start: int = 0) -> int:
        """Tokens of the longest chunk after `start` that is expected to take `budget_s`, but at least MIN_CHUNK."""
        room_s = max(0.0, budget_s / self._caution - self._overhead_s)
        square, linear = self._s_per_pair / 2, self._s_per_token + self._s_per_pair * start
        if square * room_s < 1e-12 * linear * linear:
            tokens = room_s / linear
        else:
            tokens = (math.sqrt(linear * linear + 4 * square * room_s) - linear) / (2 * square)
        is_careful = budget_s <= self.max_stall_s
        longest = min(self._longest_now, _MAX_GROWTH * self._longest) if is_careful else self._longest_now
        return min(longest, max(MIN_CHUNK, int(tokens)), self._attention.longest_chunk(start))

    def fixed_chunk(self, num_tokens: int, start: int) -> int:
        """Tokens of a chunk after `start` others if lengths depend on positions alone: halved until memory suffices."""
        longest = self._attention.longest_chunk(start)
        while num_tokens > max(longest, SHORTEST_CHUNK):
            num_tokens //= 2
        return num_tokens

    def chunk_s(self, num_tokens: int, start: int = 0) -> float:
        """Expected seconds of a chunk of `num_tokens` tokens after `start` others."""
        return self._overhead_s + num_tokens * self._s_per_token + _pairs(num_tokens, start) * self._s_per_pair

    def _fit(self, timing: ChunkTiming) -> None:
        n, pairs = timing.num_tokens, _pairs(timing.num_tokens, timing.start)
        net_s = max(0.0, timing.seconds - self._overhead_s)
        terms = (n * n, n * pairs, pairs * pairs, n * net_s, pairs * net_s)
        self._sums = [_FORGET * old + term for old, term in zip(self._sums, terms, strict=True)]
        nn, n_pairs, pp, nt, pt = self._sums
        determinant = nn * pp - n_pairs * n_pairs
        a, b = nt / nn, 0.0  # if all chunks are alike, one rate explains them
        if determinant > 1e-3 * nn * pp:
            a, b = (nt * pp - pt * n_pairs) / determinant, (pt * nn - nt * n_pairs) / determinant
            if b < 0:
                a, b = nt / nn, 0.0
            elif a < 0:
                a, b = 0.0, pt / pp
        self._s_per_token, self._s_per_pair = max(1e-9, a), b


def _pairs(num_tokens: int, start: int) -> float:
    """Number of pairs of a token and a token that it attends to."""
    return num_tokens * (start + num_tokens / 2)


def plan_prefill(
    queue: Rows[Sequence],
    pacer: PrefillPacer,
    chunk: Callable[[Sequence, int], PrefillChunk],
    budget_s: float,
) -> tuple[PrefillChunk, ...]:
    """The first prompt gets at least half of `budget_s`; prompts that fit in what is left ride along whole.

    `chunk`: plans at most so many tokens of a row, which may be none.
    """
    if not queue:
        return ()
    riders, spent_s = [], 0.0
    for seq in queue[1:]:
        start = seq.num_computed_tokens
        num_left = seq.prefill_end - start
        cost_s = pacer.chunk_s(num_left, start)
        if num_left <= pacer.chunk_tokens(budget_s, start) and spent_s + cost_s <= budget_s / 2:
            riders.append((seq, num_left))
            spent_s += cost_s
    head = chunk(queue[0], pacer.chunk_tokens(budget_s - spent_s, queue[0].num_computed_tokens))
    chunks = [head, *(chunk(seq, num_tokens) for seq, num_tokens in riders)]
    spent_s += pacer.chunk_s(head.end - head.start, head.start)
    rest = [seq for seq in queue[1:] if seq.status is SequenceStatus.PREFILLING]
    for seq in rest:  # the head took less than its share
        start = seq.num_computed_tokens
        if spent_s + pacer.chunk_s(MIN_CHUNK, start) > budget_s:
            break
        planned = chunk(seq, pacer.chunk_tokens(budget_s - spent_s, start))
        spent_s += pacer.chunk_s(planned.end - planned.start, planned.start)
        chunks.append(planned)
    return tuple(planned for planned in chunks if planned.end > planned.start)


def fixed_chunk_end(seq: Sequence, num_tokens: int) -> int:
    """The end of the next chunk if chunks depend on the sequence alone, so that numbers are rounded alike at each run.

    Chunks of a prompt end at multiples of `num_tokens` and before an image. Tokens of the reply, which a preempted row
    computes again, were computed one at a time, and are again.
    """
    start = seq.num_computed_tokens
    prompt_end = seq.num_prompt_tokens - 1  # the last token of the prompt was fed by a decode step
    if start >= prompt_end:
        return min(start + 1, seq.prefill_end)
    images = (item.offset for item in seq.prompt.media if item.offset > start)
    return min(prompt_end, start - start % num_tokens + num_tokens, *images)
