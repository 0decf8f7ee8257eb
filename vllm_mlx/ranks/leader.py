"""Rank 0's runner: it sends each plan to the workers before it carries the plan out, and all ranks do the same.

Drawing, masks and seeds stay here. The state that the prefix cache gets stays on all ranks, and has a name here.
"""

from dataclasses import replace

from ..cache.shared import Shared, SharedLog
from ..cache.tree import MemoryAwarePrefixCache
from ..core.step import NO_WORK, Restore, Snapshot, StepOutput, StepPlan
from ..runner.device import DeviceWatch
from ..runner.model import Model
from ..util.faults import RanksParted
from .lockstep import Ranks
from .runner import NUM_NAMES, PrefillContext, RankRunner
from .wire import packed


class Leader(RankRunner):
    def __init__(
        self,
        model: Model,
        watch: DeviceWatch,
        prefill_context: PrefillContext,
        ranks: Ranks,
        tree: MemoryAwarePrefixCache | None = None,
    ):
        """`tree` gets the stored state. The names of state that it no longer holds are dropped with the next plan."""
        super().__init__(model, watch, prefill_context, ranks)
        self.log = SharedLog()
        self._tree, self._num_changes = tree, (0, 0)
        self._is_reset = False
        self.num_plans = 0

    def decode(self, plan: StepPlan) -> StepOutput:
        if plan != NO_WORK or self.batches:
            self._send(plan)
        return super().decode(plan)

    def rest(self) -> None:
        """Let the workers drop the same: cached state, and all rows after a reset."""
        super().rest()
        self._drop_names()
        if (self.log or self._is_reset) and not self.batches:
            self._send(NO_WORK)
            self._ranks.watch.done()

    def reset(self) -> None:
        """Drop all rows on all ranks. Raises RanksParted if the workers compute a plan that this rank will not."""
        if self._ranks.watch.is_working:
            raise RanksParted("A step of this rank failed after its plan was sent.")
        super().reset()
        self._is_reset = True

    def _send(self, plan: StepPlan) -> None:
        self.num_plans += 1
        self._ranks.watch.begin(self.num_plans, sum(chunk.end - chunk.start for chunk in plan.prefill))
        self._drop_names()
        first = self.log.make(NUM_NAMES * (len(plan.captures) + len(plan.prefill)))
        self._name(plan, first)
        message = packed(plan) | {"n": self.num_plans, "first": first, "events": self.log.take()}
        if self._is_reset:
            message["reset"], self._is_reset = True, False
        for peer in self._ranks.peers:
            peer.say(message)

    def _drop_names(self) -> None:
        """Drop the names of state that the tree no longer holds. Every earlier capture is stored now, or refused."""
        if self._tree is None:
            return
        num_changes = self._tree.store.num_changes, len(self.log.names)
        if num_changes != self._num_changes:
            self.log.keep(self._tree.store.held())
            self._num_changes = num_changes[0], len(self.log.names)

    def _stored(self, name: int, snapshot: Snapshot) -> Snapshot:
        state = None if snapshot.state is None else Shared(self.log, name + 1, snapshot.state)
        return replace(snapshot, segment=Shared(self.log, name, snapshot.segment), state=state)

    def _restore(self, restore: Restore) -> bool:
        match = restore.match
        pieces = tuple(replace(piece, segment=piece.segment.own) for piece in match.pieces)
        own = replace(match, pieces=pieces, state=None if match.state is None else match.state.own)
        return super()._restore(replace(restore, match=own))
