"""Decides which rows verify drafts in the next step. It owns the drafts, their costs and their acceptance.

A step with drafts reads its own samples, because the next drafts depend on them. Steps without drafts run one step
ahead of reading. So one step that reads comes between them, and drafts are planned only while no sample is in flight.
"""

import logging
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import takewhile

from ..core.errors import setting
from ..core.sequence import Sequence
from ..core.step import Drafts, StepOutput
from .depth import DepthController
from .drafts import HEAD, SOURCES, Draft, RowDrafts

logger = logging.getLogger(__name__)

MOST = 7  # drafts of a row in one step: by MLX's code, Metal's vector attention takes eight queries of a row
_LAG = 2  # tokens before the first draft, if a sample is in flight: that one, and the one of the step that reads
_MOST_TOKENS = 64  # of all rows in a pass with drafts, which has logits for each of them
_JUDGED, _LEAST_ACCEPTED = 200, 0.1  # drafts after which a head is judged, and the acceptance rate that is suspicious
_ADVICE = f"its tensors do not fit the model. Use another conversion of it, or another {setting('draft_model')}."


@dataclass(slots=True)
class _Pass:
    """The pass of the last step, and the sources of its duration."""

    began_s: float | None  # when it was planned; None: the time until the next plan is not that of one pass
    num_rows: int
    num_tokens: int  # computed ones
    was_ahead: bool  # a sample was in flight
    decode_s: float | None = None  # the runner's time, if it is that of this pass alone


class Speculation:
    def __init__(
        self, depth: DepthController, vocab_size: int, *, shares_forward: bool, state_bytes: int, has_head: bool
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
        self._has_head = has_head
        self._rows: dict[int, RowDrafts] = {}  # by seq_id
        self._planned: dict[int, tuple[Sequence, str]] = {}  # the rows that have drafts in this step, and the source
        self._awaited: frozenset[tuple[int, str]] = frozenset()  # rows that get drafts after a step that reads
        self._forced: list[tuple[int, tuple[int, ...]]] = []  # by seq_id: tokens that grammars force next
        self._pass: _Pass | None = None
        self._num_wrong = 0  # drafts of the head of which a token was wrong

    @property
    def parked(self) -> str | None:
        """Return the reason why no drafts are verified at the moment. None while they are."""
        return self._depth.parked

    def open(self, seq: Sequence) -> None:
        """Begin a row, unless it was begun before it was preempted."""
        if seq.seq_id not in self._rows:
            row = RowDrafts(seq.prompt.token_ids, seq.prompt_index, seq.prediction, has_head=self._has_head)
            self._rows[seq.seq_id] = row

    def take(self, seq: Sequence, token_id: int) -> None:
        """Take a token that was added to a reply."""
        self._rows[seq.seq_id].take((token_id,))

    def close(self, seq_id: int) -> None:
        """Forget a row, whether it is known or not."""
        self._rows.pop(seq_id, None)
        for source in SOURCES:
            self._depth.forget((seq_id, source))

    def rest(self) -> None:
        """Note that the planned step does more than a forward pass."""
        if self._pass is not None:
            self._pass.began_s = None

    def plan(
        self,
        rows: Rows[Sequence],
        now_s: float,
        free_bytes: int,
        *,
        is_ahead: bool,
        merged: Collection[int],
        is_alone: bool,
    ) -> tuple[Drafts, bool]:
        """Plan the drafts of the next step, in which these rows decode, and whether it must read its own samples.

        `is_ahead`: a sample of any row is in flight. `merged` rows share their buffers with others; while drafts are
        parked, they get none, because each of them would be copied. `is_alone`: no other model has work, so that the
        time between two plans is that of a pass; otherwise the runner's own time is taken where it is known.

        `free_bytes`: memory to record recurrent states after rows have grown by all drafts; without it, no drafts.
        """
        last = self._pass
        self._observe(now_s, is_ahead=is_ahead, is_alone=is_alone)
        for seq_id, tokens in self._forced:  # the tokens before them were taken meanwhile
            if (row := self._rows.get(seq_id)) is not None:  # the reply may have ended
                row.force(tokens)
        self._forced = []
        found = self._find(rows, _LAG if is_ahead else 0, merged if self.parked is not None else ())
        limits = {(seq_id, draft.source): len(draft.tokens) for seq_id, draft in found.items()}
        for awaited in self._awaited - limits.keys():
            self._depth.learn(awaited, 1, 0)  # the reply took another way while its samples were read
        limits |= {(seq.seq_id, ""): 0 for seq in rows if seq.seq_id not in found}
        depths = self._depth.depths(limits)
        self.recorded_bytes = len(rows) * (1 + max(depths.values())) * self._state_bytes if depths else 0
        if self.recorded_bytes > free_bytes:
            depths = {}
        self._awaited = frozenset(depths if is_ahead else ())
        taken = {} if is_ahead else {seq_id: depth for (seq_id, _), depth in depths.items()}
        self._planned = {seq.seq_id: (seq, found[seq.seq_id].source) for seq in rows if seq.seq_id in taken}
        drafts = {seq_id: found[seq_id].tokens[:depth] for seq_id, depth in taken.items()}
        is_second = is_ahead and last is not None and not last.was_ahead  # the first had nothing to wait for
        widest, num_tokens = max(taken.values(), default=0), len(rows) + sum(taken.values())
        num_tokens = len(rows) * (1 + widest) if self._state_bytes else num_tokens
        self._pass = _Pass(None if is_second else now_s, len(rows), num_tokens, is_ahead) if rows else None
        return drafts, bool(self._awaited)

    def learn(self, output: StepOutput) -> None:
        """Take a step's results for drafts, and its time. A step that fails gives no cost of a pass."""
        for verified in output.verified:
            seq, source = self._planned[verified.seq_id]
            self._count(source, verified.num_drafted, verified.num_accepted)
            if source == "prediction":
                seq.num_predicted += verified.num_accepted
                seq.num_mispredicted += verified.num_drafted - verified.num_accepted
            self._depth.learn((verified.seq_id, source), verified.num_drafted, verified.num_accepted)
        self.num_passes += bool(output.verified)
        self.num_drafts += len(output.verified)
        self._forced = [*self._forced, *output.forced]
        if output.failed or output.suspects or output.failed_restores:
            self._pass = None
        elif self._pass is not None and not self._pass.was_ahead and output.decode_s is not None:
            self._pass.decode_s = output.decode_s

    def _count(self, source: str, num_drafted: int, num_accepted: int) -> None:
        was_judged = self.num_drafted[HEAD] >= _JUDGED
        self.num_drafted[source] += num_drafted
        self.num_accepted[source] += num_accepted
        for position in range(num_accepted):
            self.num_accepted_at[position] += 1
        self._num_wrong += source == HEAD and num_accepted < num_drafted
        wrong, right = self._num_wrong, self.num_accepted[HEAD]
        is_due = self.num_drafted[HEAD] >= _JUDGED and not was_judged
        if is_due and right < _LEAST_ACCEPTED * (right + wrong):
            logger.warning("The MTP head guesses %d tokens right and %d wrong: %s", right, wrong, _ADVICE)

    def _find(self, rows: Rows[Sequence], lag: int, left_out: Collection[int]) -> dict[int, Draft]:
        """Return the drafts of the rows, behind `lag` tokens for samples that are not read yet."""
        found: dict[int, Draft] = {}
        if len(rows) > 1 and not self._shares_forward:
            return found
        most = min(MOST, _MOST_TOKENS // max(1, len(rows)) - 1)
        for seq in rows:
            left = seq.decode_end - seq.num_tokens
            draft = self._rows[seq.seq_id].draft(min(lag + most, left)) if seq.seq_id not in left_out else None
            if draft is not None:
                tokens = tuple(takewhile(lambda token_id: token_id < self._vocab_size, draft.tokens))[lag:]
                if tokens:
                    found[seq.seq_id] = Draft(tokens, draft.source)
        return found

    def _observe(self, now_s: float, *, is_ahead: bool, is_alone: bool) -> None:
        if (last := self._pass) is None:
            return
        seconds = last.decode_s
        if last.began_s is not None and last.was_ahead == is_ahead and (is_alone or seconds is None):
            seconds = now_s - last.began_s
        if seconds is not None:
            self._depth.observe(last.num_rows, last.num_tokens, seconds)
