"""How many prompt tokens one step may prefill. Learns from measured chunks; reads no clock itself."""

from ..core.step import ChunkTiming

MIN_CHUNK = 16  # tokens: even a slow machine makes progress
_IDLE_STALLS = 5  # while nothing decodes, one step may take this many stall budgets: long chunks, prompt aborts


class PrefillPacer:
    """Time of a chunk is taken as `overhead + tokens / rate`.

    Slower news counts at once, faster news by half: a step that is too long is felt, one too short is not.
    """

    def __init__(self, *, max_stall_s: float, max_chunk: int, tokens_per_s: float, overhead_s: float):
        self._max_stall_s = max_stall_s
        self._max_chunk = max_chunk
        self._s_per_token = 1 / tokens_per_s
        self._overhead_s = overhead_s
        self._decode_s = 0.0

    @property
    def overhead_s(self) -> float:
        return self._overhead_s

    @property
    def s_per_token(self) -> float:
        return self._s_per_token

    def observe_chunk(self, timing: ChunkTiming) -> None:
        if timing.num_tokens < MIN_CHUNK:
            self._overhead_s = min(self._overhead_s, timing.seconds)
            return
        s_per_token = max(1e-9, (timing.seconds - self._overhead_s) / timing.num_tokens)
        self._s_per_token = max(s_per_token, (s_per_token + self._s_per_token) / 2)

    def observe_decode(self, seconds: float) -> None:
        self._decode_s = max(seconds, (self._decode_s + seconds) / 2)

    def step_budget_s(self, *, decoding: bool) -> float:
        """Seconds of prefill that one step may add."""
        if not decoding:
            return _IDLE_STALLS * self._max_stall_s
        return max(0.0, self._max_stall_s - self._decode_s)

    def chunk_tokens(self, budget_s: float) -> int:
        """The longest chunk that is expected to take at most `budget_s`, but no less than MIN_CHUNK."""
        tokens = int((budget_s - self._overhead_s) / self._s_per_token)
        return min(self._max_chunk, max(MIN_CHUNK, tokens))

    def chunk_s(self, num_tokens: int) -> float:
        return self._overhead_s + num_tokens * self._s_per_token
