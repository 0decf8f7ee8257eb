"""Rank 0's runner: it sends each plan to the workers before it carries the plan out, and everybody does the same.

Drawing, masks and seeds stay here. The state that the prefix cache gets stays on all ranks, and has a name here.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ..cache.leaving import OwnRow
from ..cache.shared import Shared, SharedLog
from ..core.faults import RanksParted
from ..core.step import NO_WORK, Capture, PrefillChunk, Restore, Snapshot, StepOutput, StepPlan
from ..runner.device import DeviceWatch
from ..runner.model import Model
from ..runner.row_fences import Unfenced, ending_ranks
from ..runner.runner import Runner
from .lockstep import Ranks
from .wire import NUM_NAMES, packed


class Leader(Runner):
    """A failure here that no other rank meets raises RanksParted, but for copies of state: everybody goes on without.

    That is so because all ranks must run the same forward passes.
    """

    fences = Unfenced

    def __init__(self, model: Model, watch: DeviceWatch, ranks: Ranks, prefill_context: Any = nullcontext):
        super().__init__(model, watch, prefill_context)
        self._peers, self._progress = ranks.peers, ranks.progress
        self._log = SharedLog()
        self._names: dict[int, int] = {}  # of the captures of the running step, by their id
        self._is_reset = False
        self._owes_prefill = False  # whether the workers compute chunks that `prefill` has not computed yet
        self.num_plans = 0
        self.plan_bytes = 0  # of the last plan

    @property
    def names(self) -> set[int]:
        """The names of the state that all ranks keep."""
        return set(self._log.names)

    def decode(self, plan: StepPlan) -> StepOutput:
        with ending_ranks():
            self._names.clear()
            if plan != NO_WORK or self.batches:
                self._send(plan)
            self._owes_prefill = bool(plan.prefill)
            output = super().decode(plan)
            if not plan.prefill:
                self._progress.done()
            return output

    def prefill(self, chunks: Iterable[PrefillChunk]) -> StepOutput:
        with ending_ranks():
            chunks = tuple(chunks)
            output = super().prefill(chunks)
            if any(chunk.capture is not None for chunk in chunks):
                output = replace(output, snapshots=_without(output.snapshots, self._ask("captures")))
            self._owes_prefill = False
            self._progress.done()
            return output

    def rest(self) -> None:
        """Tell the workers too what to drop: cached state, and all rows after a reset."""
        super().rest()
        if (self._log or self._is_reset) and not self.batches:
            with ending_ranks():
                self._send(NO_WORK)
                self._progress.done()

    def reset(self) -> None:
        """Drop all rows on all ranks. Raises RanksParted if the workers compute what this rank will not."""
        if self._owes_prefill:
            raise RanksParted("A step of this rank failed after its plan was sent.")
        super().reset()
        self._is_reset = True

    def _send(self, plan: StepPlan) -> None:
        self.num_plans += 1
        self._progress.begin(self.num_plans, sum(chunk.end - chunk.start for chunk in plan.prefill))
        message = packed(plan, self.num_plans, self._log.take(), self._new_names)
        if self._is_reset:
            message["reset"], self._is_reset = True, False
        for peer in self._peers:
            self.plan_bytes = peer.say(message)

    def _new_names(self, capture: Capture) -> int:
        self._names[id(capture)] = name = self._log.make(NUM_NAMES)
        return name

    def _ask(self, what: str) -> set[int]:
        """Return all that the workers say about their captures or restores that failed."""
        return {failed for peer in self._peers for failed in peer.hear()[what]}

    def _begin(self, plan: StepPlan) -> tuple[list[Snapshot], list[Restore]]:
        """A copy that failed on one rank is used on none. The workers wait for the answer before they compute."""
        snapshots, failed = super()._begin(plan)
        if plan.captures:
            snapshots = list(_without(snapshots, self._ask("captures")))
        if not plan.restores:
            return snapshots, failed
        unstarted = self._ask("restores") | {restore.seq.seq_id for restore in failed}
        for peer in self._peers:
            peer.say({"unstarted": sorted(unstarted)})
        return snapshots, self._unstart(plan.restores, unstarted)

    def _capture(self, capture: Capture, row: OwnRow | None = None) -> Snapshot | None:
        taken, name = super()._capture(capture, row), self._names[id(capture)]
        if taken is None:
            self._log.note(name)
            self._log.note(name + 1)
            return None
        state = None if taken.state is None else Shared(self._log, name + 1, taken.state)
        return replace(taken, segment=Shared(self._log, name, taken.segment), state=state)

    def _restore(self, restore: Restore) -> bool:
        match = restore.match
        pieces = tuple(replace(piece, segment=piece.segment.own) for piece in match.pieces)
        own = replace(match, pieces=pieces, state=None if match.state is None else match.state.own)
        return super()._restore(replace(restore, match=own))


def _without(snapshots: Iterable[Snapshot], failed: set[int]) -> tuple[Snapshot, ...]:
    return tuple(snapshot for snapshot in snapshots if snapshot.segment.name not in failed)
