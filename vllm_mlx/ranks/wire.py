"""A step plan as JSON. It names sequences and cached state by numbers, and has the ids of each chunk that is computed.

The ids that decoding rows feed are not in the plan: they may not be read yet, and travel between the devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cache.node import Match, Piece
from ..core.request import TokenSampling
from ..core.sequence import PromptInputs, Sequence
from ..core.step import Capture, PrefillChunk, Restore, StepPlan
from .channel import Message


def packed(plan: StepPlan) -> Message:
    message = {
        "captures": [_capture(capture) for capture in plan.captures],
        "release": plan.release,
        "restores": [_restore(restore) for restore in plan.restores],
        "decode": [[seq.seq_id for seq in group] for group in plan.decode],
        "isolated": sorted(plan.isolated),
        "prefill": [_chunk(chunk) for chunk in plan.prefill],
    }
    return {key: value for key, value in message.items() if value}


def _capture(capture: Capture) -> list[int]:
    return [capture.seq.seq_id, capture.start, capture.end, capture.row_length]


def _restore(restore: Restore) -> list[Any]:
    match = restore.match
    pieces = [[piece.segment.name, piece.start, piece.end, piece.window_start, piece.take] for piece in match.pieces]
    state = None if match.state is None else match.state.name
    return [restore.seq.seq_id, restore.seq.num_tokens, match.length, pieces, state]


def _chunk(chunk: PrefillChunk) -> list[Any]:
    seq, start, end = chunk.seq, chunk.start, chunk.end
    capture = None if chunk.capture is None else _capture(chunk.capture)
    return [seq.seq_id, start, end, seq.num_tokens, seq.tokens(start, end), capture, chunk.scores]


@dataclass(eq=False, slots=True, kw_only=True)
class Shadow(Sequence):
    """A sequence as a worker knows it: the ids of this step's chunks, and how many tokens its row's state holds."""

    chunks: dict[int, list[int]] = field(default_factory=dict)  # by the position of their first token
    capacity: int = 0  # its tokens on rank 0

    @property
    def num_tokens(self) -> int:
        return self.capacity

    @property
    def prefill_end(self) -> int:
        return self.num_computed_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the ids of a chunk. A decoding row feeds those of rank 0 instead."""
        return self.chunks.get(start) or [0] * (end - start)


class Unpacker:
    """Turns messages into plans for the rows of a worker."""

    def __init__(self, kept: Mapping[int, Any]):
        """`kept`: this rank's slices of shared state, by name."""
        self._kept = kept
        self._seqs: dict[int, Shadow] = {}

    def plan(self, message: Message) -> StepPlan:
        release = tuple(message.get("release", ()))
        for seq_id in release:
            self._seq(seq_id).num_computed_tokens = 0
        return StepPlan(
            captures=tuple(self._capture(*capture) for capture in message.get("captures", ())),
            release=release,
            restores=tuple(self._restore(*restore) for restore in message.get("restores", ())),
            decode=tuple(tuple(self._seq(seq_id) for seq_id in group) for group in message.get("decode", ())),
            isolated=frozenset(message.get("isolated", ())),
            prefill=tuple(self._chunk(*chunk) for chunk in message.get("prefill", ())),
        )

    def forget(self, seq_ids: "set[int]") -> None:
        """Forget the step, and all sequences but these, which have rows."""
        self._seqs = {seq_id: seq for seq_id, seq in self._seqs.items() if seq_id in seq_ids}
        for seq in self._seqs.values():
            seq.chunks.clear()

    def _seq(self, seq_id: int, capacity: int | None = None) -> Shadow:
        if seq_id not in self._seqs:
            prompt = PromptInputs(token_ids=())
            self._seqs[seq_id] = Shadow(seq_id=seq_id, prompt=prompt, sampling=TokenSampling(), max_tokens=0)
        if capacity is not None:
            self._seqs[seq_id].capacity = capacity
        return self._seqs[seq_id]

    def _capture(self, seq_id: int, start: int, end: int, row_length: int) -> Capture:
        return Capture(self._seq(seq_id), start, end, row_length, b"")

    def _restore(self, seq_id: int, capacity: int, length: int, pieces: list[list[int]], state: int | None) -> Restore:
        seq = self._seq(seq_id, capacity)
        seq.num_computed_tokens = length
        found = tuple(
            Piece(segment=self._kept[name], start=start, end=end, window_start=window_start, take=take)
            for name, start, end, window_start, take in pieces
        )
        kept_state = None if state is None else self._kept[state]
        return Restore(seq, Match(space=("", ""), length=length, pieces=found, state=kept_state))

    def _chunk(
        self, seq_id: int, start: int, end: int, capacity: int, ids: list[int], capture: list[int] | None, scores: bool
    ) -> PrefillChunk:
        seq = self._seq(seq_id, capacity)
        seq.chunks[start], seq.num_computed_tokens = ids, end
        return PrefillChunk(seq, start, end, None if capture is None else self._capture(*capture), scores)
