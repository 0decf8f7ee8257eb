"""The runner of any rank. All ranks run the same forward passes, so an error on one rank alone ends all.

Copies of cached state are the exception: all ranks continue without copies that one of them could not make.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

from ..core.step import Capture, PrefillChunk, Restore, Snapshot, StepOutput, StepPlan
from ..runner.device import DeviceWatch
from ..runner.model import Model
from ..runner.runner import Runner, Unfenced
from .lockstep import Ranks

PrefillContext = Callable[[], AbstractContextManager[None]]
NUM_NAMES = 2  # of a capture: its segment, and its state under the next number


class RankRunner(Runner):
    fences = Unfenced

    def __init__(self, model: Model, watch: DeviceWatch, prefill_context: PrefillContext, ranks: Ranks):
        super().__init__(model, watch, prefill_context)
        self._ranks = ranks
        self._names: dict[int, int] = {}  # of the captures of the running plan, by their id

    def decode(self, plan: StepPlan) -> StepOutput:
        output = super().decode(plan)
        if not plan.prefill:
            self._ranks.watch.done()
        return output

    def prefill(self, chunks: Iterable[PrefillChunk]) -> StepOutput:
        chunks = tuple(chunks)
        output = super().prefill(chunks)
        if captures := _captures(chunks):
            output = replace(output, snapshots=tuple(self._made_by_all(captures, output.snapshots)))
        self._ranks.watch.done()
        return output

    def _name(self, plan: StepPlan, first: int) -> None:
        """Give names to the captures of a plan, from `first` on."""
        captures = (*plan.captures, *_captures(plan.prefill))
        self._names = {id(capture): first + NUM_NAMES * place for place, capture in enumerate(captures)}

    def _begin(self, plan: StepPlan) -> tuple[list[Snapshot], list[Restore]]:
        snapshots, failed = super()._begin(plan)
        if plan.captures:
            snapshots = self._made_by_all(plan.captures, snapshots)
        if plan.restores:
            unstarted = self._ranks.union("restores", (restore.seq.seq_id for restore in failed))
            failed = self._unstart(plan.restores, unstarted)
        return snapshots, failed

    def _made_by_all(self, captures: Iterable[Capture], snapshots: Iterable[Snapshot]) -> list[Snapshot]:
        made = {self._names[id(snapshot.capture)]: snapshot for snapshot in snapshots}
        failed = self._ranks.union("captures", {self._names[id(capture)] for capture in captures} - made.keys())
        return [self._stored(name, snapshot) for name, snapshot in made.items() if name not in failed]

    def _stored(self, name: int, snapshot: Snapshot) -> Snapshot:
        """Store a copy under its name, and its state under the next one."""
        raise NotImplementedError


def _captures(chunks: Iterable[PrefillChunk]) -> list[Capture]:
    return [chunk.capture for chunk in chunks if chunk.capture is not None]
