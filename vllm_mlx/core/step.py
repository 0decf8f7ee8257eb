"""The messages between scheduler and runner, and from the engine to whoever waits for a sequence."""

from dataclasses import dataclass, replace

from .errors import VLLMMLXError
from .events import FinishReason, TokenLogprob
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run positions `[start, end)` of one sequence, unpadded."""

    seq: Sequence
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`decode` holds the groups of rows that step together; a row the runner holds and no group names is dropped."""

    decode: tuple[tuple[Sequence, ...], ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    release: tuple[int, ...] = ()  # seq_ids whose state is dropped: finished, aborted or preempted

    @property
    def is_empty(self) -> bool:
        return not (self.decode or self.prefill or self.release)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    seq_id: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    tokens: tuple[TokenOutput, ...] = ()
    prefilled: tuple[tuple[int, int], ...] = ()  # (seq_id, end)
    failed: tuple[tuple[int, VLLMMLXError], ...] = ()
    chunk_timings: tuple[ChunkTiming, ...] = ()
    decode_s: float | None = None  # one decode forward of all groups, where it was waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUpdate:
    """News of one sequence, from the engine thread to the event loop."""

    seq_id: int
    tokens: tuple[TokenOutput, ...] = ()
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: VLLMMLXError | None = None

    def followed_by(self, later: "SequenceUpdate") -> "SequenceUpdate":
        """Both as one."""
        return replace(later, tokens=(*self.tokens, *later.tokens))
