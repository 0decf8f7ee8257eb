"""The messages between scheduler and runner, and from the engine to the owner of a sequence."""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import VLLMMLXError
from .events import FinishReason, TokenLogprob
from .memory import NO_OVERRUN, Overrun
from .receipt import NO_RECEIPT, CacheReceipt
from .sequence import Sequence

Drafts = Mapping[int, tuple[int, ...]]  # tokens that may follow the last known token of a row, by its seq_id
Group = Rows[Sequence]  # rows that decode with their KV in the same buffers
MOST_SCORED = 256  # positions of a chunk whose logits are needed: those of a long prompt are not in memory together
BY_HEAD = -1  # instead of a draft: the model's MTP head guesses this token and those after it


@dataclass(frozen=True, slots=True)
class Restore:
    """Start a sequence from cached state."""

    seq: Sequence
    match: Any  # a cache.node.Match, opaque here because core knows no cache; its pin holds until the next update


@dataclass(frozen=True, slots=True)
class Capture:
    """Copy the state of one row: KV of `[start, end)`, and recurrent state at `end`.

    The row may be longer than `end` only if the model has no recurrent state.
    """

    seq: Sequence
    start: int
    end: int
    row_length: int  # number of tokens whose state the row holds
    key: bytes  # the first `end` tokens, as the prefix cache packs them


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run positions `[start, end)` of one sequence, without padding; then capture its state, if `capture` says so."""

    seq: Sequence
    start: int
    end: int
    capture: Capture | None = None
    scores: bool = False  # compute the log-probability of the token behind each position


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, in this order: capture and release leaving rows, restore rows, decode, prefill.

    `decode` holds the groups of rows whose KV lies together. All groups share one forward pass, except the isolated
    ones. The runner drops decoding rows that no group names.

    The `drafts` of a row are either all known or all BY_HEAD. A row that has drafts is alone in its group, and no
    sample is in flight when its step begins.
    """

    decode: tuple[tuple[Sequence, ...], ...] = ()
    isolated: frozenset[int] = frozenset()  # seq_ids of rows whose group shares no forward pass with another group
    drafts: Drafts = field(default_factory=dict)
    reads: bool = False  # read this step's samples before it ends, as a step with drafts or prefill does
    prefill: tuple[PrefillChunk, ...] = ()
    release: tuple[int, ...] = ()  # seq_ids whose state is dropped: they finished, were aborted or preempted
    captures: tuple[Capture, ...] = ()
    restores: tuple[Restore, ...] = ()


NO_WORK = StepPlan()


def forward_passes(groups: Iterable[Group], isolated: Collection[int]) -> list[list[Group]]:
    """Return the groups that share a forward pass, and each isolated group as a separate pass."""
    shared: list[Group] = []
    passes = []
    for group in groups:
        if group[0].seq_id in isolated:
            passes.append([group])
        else:
            shared.append(group)
    return [shared, *passes] if shared else passes


@dataclass(frozen=True, slots=True)
class TokenOutput:
    seq_id: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """Counts of a row's drafts in a step: those computed, and those that the row's own draws confirmed."""

    seq_id: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The result of a capture, detached from the row's buffers."""

    capture: Capture
    segment: Any  # a cache.node.Segment of `[start, end)`
    window_start: int  # the segment holds sliding-window layers from here on
    state: Any | None  # a cache.node.State at `end`


@dataclass(frozen=True, slots=True)
class Scored:
    seq_id: int
    start: int  # the first position of the chunk
    logprobs: tuple[TokenLogprob, ...]  # of the tokens behind its positions


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result of one text of a sequence for an encoder."""

    seq_id: int
    start: int  # position of its first token
    num_tokens: int
    vector: Any  # numpy, (dimensions,), float32; one number for a score


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    start: int  # tokens before the chunk
    num_tokens: int
    seconds: float
    score_s: float = 0.0  # more seconds, to compute the log-probabilities of its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    tokens: tuple[TokenOutput, ...] = ()
    verified: tuple[Verified, ...] = ()  # one for each row that had drafts and whose tokens are reported
    forced: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (seq_id, tokens that its grammar forces next)
    prefilled: tuple[tuple[int, int], ...] = ()  # (seq_id, end)
    scored: tuple[Scored, ...] = ()
    encoded: tuple[Encoded, ...] = ()
    failed: tuple[tuple[int, VLLMMLXError], ...] = ()
    suspects: tuple[int, ...] = ()  # seq_ids whose state is lost to a fault that another row may have caused
    snapshots: tuple[Snapshot, ...] = ()
    refused: tuple[tuple[int, int], ...] = ()  # (seq_id, tokens) of chunks for which the device had no memory
    failed_restores: tuple[Restore, ...] = ()  # rows that were not started, because the match is damaged
    chunk_timings: tuple[ChunkTiming, ...] = ()
    decode_s: float | None = None  # time of the decoding alone, if it was measured
    overrun: Overrun = NO_OVERRUN


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUpdate:
    """The progress of one sequence, sent from the engine thread to the event loop."""

    seq_id: int
    tokens: tuple[TokenOutput, ...] = ()
    prompt_logprobs: Rows[TokenLogprob] = ()  # once all are known
    vectors: Rows[Any] = ()  # of an encoder, once all are known: numpy, (dimensions,), float32, in the order of texts
    num_encoded: int = 0  # texts whose vectors or scores are known
    num_computed_tokens: int = 0
    receipt: CacheReceipt = NO_RECEIPT
    num_predicted: int = 0
    num_mispredicted: int = 0
    scheduled_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: VLLMMLXError | None = None

    @classmethod
    def joined(cls, updates: "Rows[SequenceUpdate]") -> "SequenceUpdate":
        """Join several updates of one sequence, at least one, into one."""
        *_, last = updates
        errors = [update.error for update in updates if update.error is not None]
        tokens = tuple(token for update in updates for token in update.tokens)
        return replace(last, tokens=tokens, error=errors[-1] if errors else None)
