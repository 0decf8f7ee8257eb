"""Decides which rows verify drafts in the next step. It owns the drafts, what they cost, and what they were worth.

A step with drafts reads its own samples, because the next drafts depend on them. Steps without drafts run one step
ahead of reading. So one step that reads comes between them, and drafts are planned only while no sample is in flight.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import takewhile

from ..core.sequence import Sequence
from ..core.step import StepOutput
from .depth import DepthController
from .drafts import HEAD, Draft, Drafter

MOST = 7  # drafts of a row in one step; Metal's vector attention takes eight queries of a row
_LAG = 2  # tokens before the first draft, if a sample is in flight: that one, and the one of the step that reads
_MOST_TOKENS = 64  # of all rows in a pass with drafts, which has logits for each of them

Drafts = Mapping[int, tuple[int, ...]]  # by seq_id


@dataclass(frozen=True, slots=True)
class _Step:
    """The last decode step, if its time says what a forward pass costs."""

    began_s: float
    num_rows: int
    num_tokens: int  # computed ones


class Speculation:
    def __init__(
        self,
        depth: DepthController,
        vocab_size: int,
        *,
        shares_forward: bool = True,
        state_bytes: int = 0,
        has_head: bool = False,
    ):
        """`vocab_size`: ids from here on have no logit. `state_bytes`: recurrent state of a row, which is recorded at
        each token of a pass with drafts; the rows of such a pass are padded to the longest one. `has_head`: the model
        has an MTP head.
        """
        self._vocab_size = vocab_size
        self.num_drafted: Counter[str] = Counter()  # by source
        self.num_accepted: Counter[str] = Counter()  # by source
        self.num_accepted_at = [0] * MOST  # by position in the draft
        self.num_passes = 0  # forward passes with drafts
        self.num_drafts = 0  # rows that had drafts, one for each pass
        self.recorded_bytes = 0  # recurrent states that the next step records
        self._depth = depth
        self._shares_forward = shares_forward
        self._state_bytes = state_bytes
        self._drafter = Drafter(has_head=has_head)
        self._planned: dict[int, tuple[Sequence, str]] = {}  # the rows that have drafts in this step, and the source
        self._decided: dict[int, int] = {}  # depths of the next step, after one that reads
        self._forced: list[tuple[int, tuple[int, ...]]] = []  # by seq_id: what grammars force next
        self._coming: _Step | None = None  # planned, and not carried out yet
        self._step: _Step | None = None
        self._was_ahead = False  # whether the last step left samples unread

    @property
    def parked(self) -> str | None:
        """Why no drafts are verified at the moment. None while they are."""
        return self._depth.parked

    def open(self, seq: Sequence) -> None:
        """Begin a row, unless it was begun before it was preempted."""
        if seq.seq_id in self._drafter:
            return
        self._drafter.open(seq.seq_id, seq.prompt.token_ids, seq.prompt_index, seq.prediction)
        self._drafter.take(seq.seq_id, seq.output_token_ids)

    def take(self, seq: Sequence, token_id: int) -> None:
        """Take a token that was added to a reply."""
        self._drafter.take(seq.seq_id, (token_id,))

    def close(self, seq_id: int) -> None:
        self._drafter.close(seq_id)
        for source in ("", HEAD):
            self._depth.forget(_key(seq_id, source))

    def rest(self) -> None:
        """Do not measure the planned step: its time is not that of a forward pass alone."""
        self._coming, self._was_ahead = None, False

    def plan(
        self,
        rows: Rows[Sequence],
        now_s: float,
        free_bytes: int,
        *,
        is_ahead: bool,
        merged: Collection[int],
    ) -> tuple[Drafts, bool]:
        """Plan the drafts of the next step, in which these rows decode, and whether it must read its own samples.

        `is_ahead`: a sample of any row is in flight. `merged` rows share their buffers with others; while drafts are
        parked, they get none, because each of them would be copied.

        `free_bytes` is the memory in which recurrent states can be recorded, beside rows that grow by all drafts. There
        are no drafts if they do not fit.
        """
        self._observe(now_s)
        for seq_id, tokens in self._forced:  # the tokens before them were taken meanwhile
            self._drafter.force(seq_id, tokens)
        self._forced = []
        lag = _LAG if is_ahead else 0
        found = self._find(rows, lag) if len(rows) == 1 or self._shares_forward else {}
        if self._depth.parked is not None:
            found = {seq_id: draft for seq_id, draft in found.items() if seq_id not in merged}
        available = {
            seq.seq_id: max(0, len(found[seq.seq_id].tokens) - lag) if seq.seq_id in found else 0 for seq in rows
        }
        decided, self._decided = self._decided, {}
        if decided and not is_ahead:
            depths = {seq_id: min(depth, available.get(seq_id, 0)) for seq_id, depth in decided.items()}
            for seq_id in [seq_id for seq_id, depth in depths.items() if not depth]:
                self._depth.learn(seq_id, 1, 0)  # the reply took another way while its samples were read
        else:
            depths = self._depths(available, found) if any(available.values()) else {}
        self.recorded_bytes = self._recorded_bytes(len(rows), max(depths.values(), default=0))
        if self.recorded_bytes > free_bytes:
            depths = {}
        self._decided = depths if is_ahead else {}
        taken = {seq_id: depth for seq_id, depth in depths.items() if depth and not is_ahead}
        self._planned = {seq.seq_id: (seq, found[seq.seq_id].source) for seq in rows if seq.seq_id in taken}
        drafts = {seq_id: found[seq_id].tokens[:depth] for seq_id, depth in taken.items()}
        reads = bool(self._decided)
        if rows and not reads and (drafts or (is_ahead and self._was_ahead)):
            self._coming = _Step(now_s, len(rows), self._num_tokens(len(rows), drafts))
        self._was_ahead = is_ahead and not reads
        return drafts, reads

    def learn(self, output: StepOutput) -> None:
        """Take in what a step says of drafts. A step that prefills or fails does not say what a pass costs."""
        for verified in output.verified:
            seq, source = self._planned[verified.seq_id]
            self.num_drafted[source] += verified.num_drafted
            self.num_accepted[source] += verified.num_accepted
            for position in range(verified.num_accepted):
                self.num_accepted_at[position] += 1
            if source == "prediction":
                seq.num_predicted += verified.num_accepted
                seq.num_mispredicted += verified.num_drafted - verified.num_accepted
            self._depth.learn(_key(verified.seq_id, source), verified.num_drafted, verified.num_accepted)
        self.num_passes += bool(output.verified)
        self.num_drafts += len(output.verified)
        self._forced = [*self._forced, *output.forced]
        is_odd = output.chunk_timings or output.failed or output.suspects or output.snapshots or output.failed_restores
        self._step = None if is_odd else self._coming

    def _depths(self, available: Mapping[int, int], found: Mapping[int, Draft]) -> dict[int, int]:
        keys = {row: _key(row, found[row].source if row in found else "") for row in available}
        depths = self._depth.depths({keys[row]: number for row, number in available.items()})
        return {row: depths[key] for row, key in keys.items() if key in depths}

    def _find(self, rows: Rows[Sequence], lag: int) -> dict[int, Draft]:
        """The drafts of the rows, of which the first `lag` tokens stand for samples that are not read yet."""
        found, most = {}, min(MOST, _MOST_TOKENS // len(rows) - 1)
        for seq in rows:
            left = seq.decode_end - seq.num_tokens
            draft = self._drafter.draft(seq.seq_id, min(lag + most, left))
            if draft is not None:
                tokens = tuple(takewhile(lambda token_id: token_id < self._vocab_size, draft.tokens))
                found[seq.seq_id] = Draft(tokens, draft.source)
        return found

    def _observe(self, now_s: float) -> None:
        step, self._step, self._coming = self._step, None, None
        if step is not None:
            self._depth.observe(step.num_rows, step.num_tokens, now_s - step.began_s)

    def _num_tokens(self, num_rows: int, drafts: Drafts) -> int:
        longest = max(map(len, drafts.values()), default=0)
        return num_rows * (1 + longest) if self._state_bytes else num_rows + sum(map(len, drafts.values()))

    def _recorded_bytes(self, num_rows: int, depth: int) -> int:
        return num_rows * (1 + depth) * self._state_bytes if depth else 0


def _key(seq_id: int, source: str) -> int:
    """The key of a row's odds. Those of a head's drafts are kept apart from those of the row's other drafts."""
    return ~seq_id if source == HEAD else seq_id
