"""A worker: it carries out the plans of rank 0 on its shard, and decides nothing. It reads no token.

It branches on no clock, on no memory and on nothing that fails here alone, so that all ranks compute the same.
"""

from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from ..cache.leaving import OwnRow
from ..cache.shared import Event
from ..core.step import Capture, PrefillChunk, Restore, Snapshot, StepPlan, TokenOutput
from ..runner.device import DeviceWatch
from ..runner.model import Model
from ..runner.row_fences import RowFences, Unfenced
from ..runner.runner import Runner
from .channel import Message
from .lockstep import STOP, Ranks
from .wire import Unpacker


class Worker(Runner):
    """The runner of a rank that follows rank 0."""

    fences = Unfenced

    def __init__(self, model: Model, watch: DeviceWatch, ranks: Ranks, prefill_context: Any = nullcontext):
        super().__init__(model, watch, prefill_context)
        self._peer, self._progress = ranks.peers[0], ranks.progress
        self._kept: dict[int, Any] = {}  # this rank's slices of shared state, by name
        self._unpacker = Unpacker(self._kept)
        self._failed: list[int] = []  # names of captures of this step that failed

    @property
    def names(self) -> set[int]:
        """The names of the state that is kept here."""
        return set(self._kept)

    def work(self) -> None:
        """Carry out plans until rank 0 says that it stops. Raises what ends this rank, and so all of them."""
        while STOP not in (message := self._peer.hear()):
            self.follow(message)

    def follow(self, message: Message) -> None:
        """Carry out one plan."""
        if message.get("reset"):
            self.reset()
        for event in message.get("events", ()):
            self._heed(event)
        plan = self._unpacker.plan(message)
        self._progress.begin(message["n"], 0)
        self.decode(plan)
        if plan.prefill:
            self.prefill(plan.prefill)
        if any(chunk.capture is not None for chunk in plan.prefill):
            self._tell_captures()
        rows = {seq_id for batch in self.batches for seq_id in batch.seq_ids}
        self._unpacker.forget(rows | self._prefilled.keys())
        self._progress.done()

    def _heed(self, event: Event) -> None:
        match event:
            case [name]:
                self._kept.pop(name, None)  # it is unknown if the capture failed here
            case [name, at, left, right]:
                self._kept[left], self._kept[right] = self._kept[name].split(at)

    def _begin(self, plan: StepPlan) -> tuple[list[Snapshot], list[Restore]]:
        _, failed = super()._begin(plan)
        if plan.captures:
            self._tell_captures()
        if not plan.restores:
            return [], []
        self._peer.say({"restores": [restore.seq.seq_id for restore in failed]})
        return [], self._unstart(plan.restores, set(self._peer.hear()["unstarted"]))

    def _tell_captures(self) -> None:
        failed, self._failed = self._failed, []
        self._peer.say({"captures": failed})

    def _capture(self, capture: Capture, row: OwnRow | None = None) -> Snapshot | None:
        taken, name = super()._capture(capture, row), self._unpacker.names[id(capture)]
        if taken is None:
            self._failed.append(name)
            return None
        self._kept[name] = taken.segment
        if taken.state is not None:
            self._kept[name + 1] = taken.state
        return taken

    def _step(self, fences: RowFences) -> list[TokenOutput]:
        """Launch the forward passes. An unevaluated one would skip its collectives, and all ranks would hang."""
        for batch in self.batches:
            batch.start()
        return []

    def _run_chunk(self, chunk: PrefillChunk, fences: RowFences) -> float | None:
        seconds = super()._run_chunk(chunk, fences)
        mx.synchronize()  # without Python's lock, with which `clear_cache` would wait, and stop the watch of ranks
        return seconds

    def _check_device(self) -> None:
        """Do not wait: the next plan comes while the device works. A failure ends the rank at the next chance."""
        mx.async_eval(self._probe + 1)  # type: ignore[no-untyped-call]
