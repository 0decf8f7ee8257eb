"""What the engine's front counts on the event loop: one request's progress, totals, and rates over a sliding window."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.step import SequenceUpdate

RATE_WINDOW_S = 10.0

Phase = Literal["queued", "prefill", "generation"]


@dataclass(slots=True, kw_only=True)
class ReplyStats:
    """One reply under way. Times are of the event loop's clock, in seconds."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    arrived_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    computed_tokens: int = 0  # of the prompt, those from the cache included
    cached_tokens: int = 0
    completion_tokens: int = 0
    cache_hit_type: str | None = None  # None: not looked up yet

    def take(self, update: SequenceUpdate, now: float) -> int:
        """Returns the prompt tokens that were computed since the last update."""
        if self.cache_hit_type is None:
            self.cache_hit_type = update.cache_hit_kind
            self.cached_tokens = self.computed_tokens = update.num_cached_tokens
        computed = min(self.prompt_tokens, max(self.computed_tokens, update.num_computed_tokens))
        if update.tokens:
            computed = self.prompt_tokens
            self.first_token_s = self.first_token_s if self.first_token_s is not None else now
            self.last_token_s = now
            self.completion_tokens += len(update.tokens)
        new, self.computed_tokens = computed - self.computed_tokens, computed
        return new

    @property
    def phase(self) -> Phase:
        if self.first_token_s is not None:
            return "generation"
        return "queued" if self.cache_hit_type is None else "prefill"

    def to_dict(self, now: float) -> dict[str, Any]:
        """The fields that monitors read for each request."""
        decoding_s = 0.0 if self.first_token_s is None else now - self.first_token_s
        return {
            "request_id": self.request_id,
            "status": "waiting" if self.phase == "queued" else "running",
            "phase": self.phase,
            "elapsed_s": round(now - self.arrived_s, 3),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "max_tokens": self.max_tokens,
            "progress": round(self._progress(), 4),
            "tokens_per_second": round((self.completion_tokens - 1) / decoding_s, 2) if decoding_s > 0 else 0.0,
            "ttft_s": None if self.first_token_s is None else round(self.first_token_s - self.arrived_s, 4),
            "cache_hit_type": self.cache_hit_type or "miss",
            "cached_tokens": self.cached_tokens,
        }

    def _progress(self) -> float:
        """Of the phase it is in: prompt tokens computed, or reply tokens of those allowed."""
        if self.phase == "generation":
            return self.completion_tokens / self.max_tokens
        return self.computed_tokens / self.prompt_tokens


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


@dataclass(slots=True, kw_only=True)
class Totals:
    started_s: float
    requests: int = 0  # that ended, whichever way
    prompt_tokens: int = 0  # cached ones included
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_rate: TokenRate = field(init=False)  # of computed tokens
    completion_rate: TokenRate = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_rate = TokenRate(self.started_s)
        self.completion_rate = TokenRate(self.started_s)

    def take(self, stats: ReplyStats, update: SequenceUpdate, now: float) -> None:
        was_known = stats.cache_hit_type is not None
        computed = stats.take(update, now)
        if not was_known:
            self.prompt_tokens += stats.prompt_tokens
            self.cached_tokens += stats.cached_tokens
        self.completion_tokens += len(update.tokens)
        self.prompt_rate.add(computed, now)
        self.completion_rate.add(len(update.tokens), now)
