"""The messages between scheduler and runner, and from the engine to whoever waits for a sequence."""

from collections.abc import Callable
from collections.abc import Sequence as Updates
from dataclasses import dataclass, replace
from typing import Any

from .errors import VLLMMLXError
from .events import FinishReason, TokenLogprob
from .memory import NO_OVERRUN, Overrun
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Restore:
    """Start a sequence from cached state."""

    seq: Sequence
    match: Any  # a cache.tree.Match: opaque here, since core knows no cache
    release: Callable[[], None]  # ends the match's pin, once its state is copied


@dataclass(frozen=True, slots=True)
class Capture:
    """Copy the state of one row: KV of `[start, end)`, and whatever cannot be sliced as it stands at `end`.

    Only a model whose state can all be sliced has a row that is longer than `end`.
    """

    seq: Sequence
    start: int
    end: int
    row_length: int  # tokens whose state the row holds
    key: bytes  # of the first `end` tokens, as the prefix cache packs them


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run positions `[start, end)` of one sequence, unpadded; then capture, where `end` is worth keeping."""

    seq: Sequence
    start: int
    end: int
    capture: Capture | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """In this order: captures of rows that leave, releases, restores, decode, prefill.

    `decode` holds the groups of rows that step together; a row the runner holds and no group names is dropped.
    """

    decode: tuple[tuple[Sequence, ...], ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    release: tuple[int, ...] = ()  # seq_ids whose state is dropped: finished, aborted or preempted
    captures: tuple[Capture, ...] = ()
    restores: tuple[Restore, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    seq_id: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A capture carried out: detached from the row's buffers."""

    capture: Capture
    segment: Any  # a cache.node.Segment of `[start, end)`
    window_start: int  # from here on the segment holds sliding-window layers too
    state: Any | None  # a cache.node.State at `end`


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    start: int  # tokens before it
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    tokens: tuple[TokenOutput, ...] = ()
    prefilled: tuple[tuple[int, int], ...] = ()  # (seq_id, end)
    failed: tuple[tuple[int, VLLMMLXError], ...] = ()
    suspects: tuple[int, ...] = ()  # seq_ids whose state is lost to a fault that may be another row's
    snapshots: tuple[Snapshot, ...] = ()
    failed_restores: tuple[Restore, ...] = ()  # the row was not started; its match is damaged
    chunk_timings: tuple[ChunkTiming, ...] = ()
    decode_s: float | None = None  # one decode forward of all groups, where it was waited for
    overrun: Overrun = NO_OVERRUN


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUpdate:
    """News of one sequence, from the engine thread to the event loop."""

    seq_id: int
    tokens: tuple[TokenOutput, ...] = ()
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_stored_tokens: int = 0
    cache_hit_kind: str = "miss"
    scheduled_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: VLLMMLXError | None = None

    @classmethod
    def of(cls, seq: Sequence, tokens: tuple[TokenOutput, ...] = ()) -> "SequenceUpdate":
        """How far it is."""
        return cls(
            seq_id=seq.seq_id,
            tokens=tokens,
            num_computed_tokens=seq.num_computed_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_stored_tokens=seq.num_stored_tokens,
            cache_hit_kind=seq.cache_hit_kind,
            scheduled_s=seq.scheduled_s,
            finish_reason=seq.finish_reason,
            stop_token_id=seq.stop_token_id,
        )

    @classmethod
    def joined(cls, updates: "Updates[SequenceUpdate]") -> "SequenceUpdate":
        """Several updates of one sequence, at least one, as one."""
        *_, last = updates
        errors = [each.error for each in updates if each.error is not None]
        tokens = tuple(token for each in updates for token in each.tokens)
        return replace(last, tokens=tokens, error=errors[-1] if errors else None)
